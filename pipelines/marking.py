"""Whether an answer is the expected one: both go through the same steps, and what came of them is compared."""

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from pipelines.config import SamplingConfig
from pipelines.postprocess import Postprocessor
from pipelines.rows import Completion

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def is_correct(answer: Completion, expected: str, sampling: SamplingConfig, steps: Postprocessor) -> bool | None:
    """Whether an answer, after its steps, says what the expected one says after the same steps.

    Numbers count by what they are worth (1,000 is 1000.0), text without the space around it, and all else as JSON. None where
    the steps cannot take what is expected, or where both are nested too deeply to be compared.
    """
    model = steps.apply(Completion(text=expected, finish_reason="stop", stop_reason=None, num_output_tokens=0), sampling)
    if model.error is not None:
        return None
    if answer.error is not None:
        return False
    try:
        return bool(_value(answer) == _value(model))
    except RecursionError:
        return None


def _value(one: Completion) -> Any:
    return _comparable(one.text if one.parsed is None else json.loads(one.parsed))


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_comparable(one) for one in value]
    if isinstance(value, bool):
        return (value,)  # to Python, true is 1
    return _number_or_text(str(value).strip()) if isinstance(value, str | int | float) else value


def _number_or_text(text: str) -> Decimal | str:
    try:
        number = Decimal(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    except InvalidOperation:
        return text
    return number if number.is_finite() else text
