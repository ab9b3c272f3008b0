"""The base class of request bodies and of the objects inside them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator

from outpace.server.errors import ApiError

MAX_FIELDS = 100  # of an object with known fields


class Body(BaseModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: object) -> object:
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ApiError(400, f"an object of the request has {len(given)} fields; at most {MAX_FIELDS} are allowed")
        return given
