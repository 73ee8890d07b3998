"""Answers to wire types, and a caller's values to request types, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from cpuos.errors import InvalidRequest, PlatformError

__all__ = ["make_labels", "make_request", "parse_answer"]

Model = TypeVar("Model", bound=BaseModel)


def parse_answer(model: type[Model], body: bytes) -> Model:
    """Unknown fields pass; a missing or wrong one is a fault of the other side."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise PlatformError(f"cannot read the answer: {model.__name__}", _first_problem(error)) from error


def make_request(model: type[Model], values: dict[str, Any], *, doing: str) -> bytes:
    """JSON of the values given, or InvalidRequest that names field and value."""
    try:
        return model(**values).model_dump_json(exclude_unset=True).encode()
    except ValidationError as error:
        from cpuos.types.problems import invalid_request  # only for the error: imports stay light

        raise invalid_request(error.errors(include_url=False), what=f"cannot {doing}", python=True) from error
    except PydanticSerializationError as error:
        raise InvalidRequest(
            f"cannot {doing}: a text in it is not valid Unicode", "bytes that are no text go by stdin or a file"
        ) from error


def make_labels(labels: Any) -> dict[str, str]:
    """A copy of labels as a caller gave them."""
    if not isinstance(labels, Mapping):
        raise InvalidRequest(
            f"cannot read labels: {labels!r:.200}",
            "labels are a mapping of names to texts",
            hint='labels={"team": "data"}',
            details={"field": "labels"},
        )
    return dict(labels)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
