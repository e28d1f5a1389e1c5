"""Field names and types of what the gateway answers, beside those of the openai SDK's models."""

from __future__ import annotations

import importlib
import types
import typing
from typing import Any, Literal, Union

import msgspec
import openai.types as sdk
import pydantic
import pytest
from msgspec import UNSET, UnsetType
from openai.types import batch_error, batch_request_counts, batch_usage

from gateway.http import errors

#: The gateway's struct and the SDK's model. A module that this version has not is left out.
PAIRS = [
    ("batches.api.protocol", "Batch", sdk.Batch),
    ("batches.api.protocol", "BatchErrors", importlib.import_module("openai.types.batch").Errors),
    ("batches.api.protocol", "BatchError", batch_error.BatchError),
    ("batches.api.protocol", "RequestCounts", batch_request_counts.BatchRequestCounts),
    ("batches.api.protocol", "BatchUsage", batch_usage.BatchUsage),
    ("batches.api.protocol", "InputDetails", batch_usage.InputTokensDetails),
    ("batches.api.protocol", "OutputDetails", batch_usage.OutputTokensDetails),
    ("files.protocol", "File", sdk.FileObject),
    ("files.protocol", "Deleted", sdk.FileDeleted),
    ("files.uploads", "Upload", sdk.Upload),
    (
        "files.uploads",
        "UploadPart",
        importlib.import_module("openai.types.uploads").UploadPart,
    ),
    ("online.models", "Model", sdk.Model),
]
#: Texts that are one of the SDK's, or newer: `evals` is a purpose that its model does not name.
ANY_TEXT = {("File", "purpose")}
#: Fields of the SDK's models that the gateway never sends.
LEFT_OUT = {"File": {"status_details"}, "Model": {"shutdown_date"}}
#: Fields that only the gateway has.
ADDED = {"Batch": {"failures", "cut", "cached"}}


def struct_of(module: str, name: str) -> type[msgspec.Struct]:
    """Return one of the gateway's structs."""
    struct = getattr(importlib.import_module(f"gateway.{module}"), name)
    assert issubclass(struct, msgspec.Struct)
    return struct


def kinds(of: Any) -> set[str]:
    """Return what a field may hold, in JSON's words; objects by their name in the SDK."""
    origin = typing.get_origin(of)
    if origin is typing.Annotated:
        return kinds(typing.get_args(of)[0])
    if origin in (Union, types.UnionType):
        return set().union(*(kinds(each) for each in typing.get_args(of)))
    if origin is Literal:
        return {repr(value) for value in typing.get_args(of)}
    if origin is list:
        return {"list"}
    if origin is dict or of is dict:
        return {"object"}
    if of is UnsetType:
        return set()
    if of is type(None):
        return {"null"}
    if isinstance(of, type) and issubclass(of, msgspec.Struct | pydantic.BaseModel):
        return {"object"}
    return {str: {"text"}, int: {"number"}, float: {"number"}, bool: {"bool"}}[of]


def missing_from(ours: set[str], theirs: set[str]) -> set[str]:
    """Return what we may send that the SDK does not expect."""
    texts = {kind for kind in ours if kind.startswith("'")}
    return (ours - texts if "text" in theirs else ours) - theirs


@pytest.mark.parametrize(("module", "name", "model"), PAIRS)
def test_the_fields_are_those_of_the_sdk(
    module: str, name: str, model: type[pydantic.BaseModel]
) -> None:
    struct = struct_of(module, name)
    ours = {field.encode_name for field in msgspec.structs.fields(struct)}
    theirs = {field.alias or key for key, field in model.model_fields.items()}
    assert theirs - LEFT_OUT.get(name, set()) <= ours
    assert ours - ADDED.get(name, set()) <= theirs


@pytest.mark.parametrize(("module", "name", "model"), PAIRS)
def test_each_field_holds_what_the_sdk_expects(
    module: str, name: str, model: type[pydantic.BaseModel]
) -> None:
    struct = struct_of(module, name)
    for field in msgspec.structs.fields(struct):
        if field.encode_name not in model.model_fields:
            continue
        expected = model.model_fields[field.encode_name]
        extra = missing_from(kinds(field.type), kinds(expected.annotation))
        if (name, field.encode_name) in ANY_TEXT:
            extra -= {"text"}
        assert not extra, (field.encode_name, extra)
        if expected.is_required():
            assert UnsetType not in typing.get_args(field.type), f"{field.name} may be left out"
            assert field.default is not UNSET


@pytest.mark.parametrize(
    ("module", "name", "required"),
    [
        (
            "batches.api.protocol",
            "BatchList",
            {"object", "data", "has_more", "first_id", "last_id"},
        ),
        ("files.protocol", "FileList", {"object", "data", "has_more", "first_id", "last_id"}),
        ("online.models", "ModelList", {"object", "data"}),
    ],
)
def test_a_page_has_what_the_sdks_page_by(module: str, name: str, required: set[str]) -> None:
    struct = struct_of(module, name)
    assert {field.encode_name for field in msgspec.structs.fields(struct)} == required


def test_an_error_has_all_four_keys() -> None:
    body = errors.invalid("wrong").body
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    for value in errors.ApiError(503, "away").body["error"].values():
        assert value is None or isinstance(value, str)
