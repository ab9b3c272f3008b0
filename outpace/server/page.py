"""The page at `/`, the reference at `/docs`, and their files. They are read once, and only these files are served.

The content policy allows scripts and styles from these files only, and no text can become markup: the page writes what
a model says as text, and `require-trusted-types-for` makes the browser refuse anything else.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

import outpace.web
from outpace.server.errors import ApiError

FOLDER = Path(outpace.web.__file__).parent
STATIC = "/static/"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a browser asks whether its copy is still the newest
}


class PageFile:
    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.type = f"{_TYPES[path.suffix]}; charset=utf-8"
        self.tag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'

    def reply(self, request: Request) -> Response:
        headers = _HEADERS | {"etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.type)


def page_files() -> dict[str, PageFile]:
    """By name."""
    paths = [FOLDER / "style.css", *sorted((FOLDER / "page").iterdir())]
    return {path.name: PageFile(path) for path in paths if path.suffix in _TYPES}


def page_router(*, has_page: bool) -> APIRouter:
    """Without the page, `/docs` and the files it needs remain."""
    files, router = page_files(), APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def reference(request: Request) -> Response:
        return files["docs.html"].reply(request)

    @router.get(STATIC + "{name}")
    async def static(name: str, request: Request) -> Response:
        if name not in files:
            raise ApiError(404, f"there is no file {name!r} here", code="not_found")
        return files[name].reply(request)

    if has_page:

        @router.get("/")
        async def page(request: Request) -> Response:
            return files["index.html"].reply(request)

    return router
