"""Extraction with a JSON frame: the frame is text, and only the values are generated.

python examples/extract.py [--url http://127.0.0.1:8000/v1]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from outpace import LLM
from outpace.programs import State, gen, run

CALLS = (
    "Ms Iris Novak from Graz says that her kettle leaks at the handle. We agreed on a refund.",
    "Tom Baker, Leeds: the desk lamp he bought in May does not switch on. He gets a new one.",
    "Aiko Tanaka called about a tent with a broken zip. It will be repaired within 9 days.",
)
EXAMPLE = 'Call: Mr Ola Berg in Oslo: his toaster smells of smoke. Refund after 3 days.\n{"customer": "Ola Berg", \
"product": "toaster", "days": 3, "outcome": "refund"}\n\n'


def extract(s: State, call: str) -> Any:
    s += f'The facts of support calls as JSON.\n\n{EXAMPLE}Call: {call}\n{{"customer": "'
    s += gen("customer", max_tokens=16, stop='"')
    s += '", "product": "'
    s += gen("product", max_tokens=12, stop='"')
    s += '", "days": '
    s += gen("days", regex="null|[0-9]{1,2}")
    s += ', "outcome": "'
    s += gen("outcome", choice=["refund", "repair", "replacement"])
    s += '"}'
    return json.loads(s.text[s.text.rindex("{") :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server with OpenAI's API (default: the embedded model in this process)")
    options = parser.parse_args()
    for result in run(extract, CALLS, on=options.url or LLM()):
        print(result.value)


if __name__ == "__main__":
    main()
