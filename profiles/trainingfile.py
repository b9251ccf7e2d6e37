"""The training YAML (``kind: training``) and the flags that override it -> TrainingSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from profiles import yamlfile
from profiles.fileschema import FileSchema, Version, problem_at, validate
from profiles.training import AttentionKernel, GradDtype, Optimizer, Precision, TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["TrainingFile", "load_training"]


class TrainingFile(FileSchema):
    """One training run."""

    schema_version: Version
    kind: Literal["training"]
    global_batch: int = Field(ge=1, le=10**9, description="Sequences a step.")
    seq_len: int = Field(ge=1, le=10**9, description="Tokens a sequence.")
    micro_batch: int | None = Field(
        None, ge=1, le=10**6, description="Sequences a pass; none = the search chooses."
    )
    precision: Precision = Field(Precision.BF16, strict=False, description="Of the GEMMs.")
    optimizer: Optimizer = Field(Optimizer.ADAMW, strict=False, description="And its states.")
    grad_dtype: GradDtype = Field(
        GradDtype.FP32, strict=False, description="In which gradients are reduced."
    )
    attention: AttentionKernel = Field(
        AttentionKernel.FLASH2, strict=False, description="Attention kernel."
    )
    fused_kernels: bool = Field(
        default=True, description="Norm, activation and rotary embedding each as one kernel."
    )


def load_training(
    path: str | Path | None, overrides: Mapping[str, Any] | None = None
) -> TrainingSpec:
    """The training run of a file (or of the defaults), with ``overrides`` from the command line.

    Overrides are called as the fields are; one that is None leaves the file's value. A problem
    with an override is told with its flag.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    stated: dict[str, Any] = {"schema_version": 1, "kind": "training"}
    document = (
        yamlfile.Document(path="training", data=stated) if path is None else yamlfile.read(path)
    )
    absent = TrainingFile.model_fields.keys() - document.data.keys() if path is None else ()
    document = yamlfile.Document(
        path=document.path,
        data={**document.data, **given},
        values={p: mark for p, mark in document.values.items() if not p or p[0] not in given},
        keys=document.keys,
        found=document.found,
        flags={key: "--" + key.replace("_", "-") for key in (*given, *absent)},
    )
    file = validate(document, TrainingFile)
    if file.micro_batch is not None and file.global_batch % file.micro_batch:
        message = f"micro_batch {file.micro_batch} with global_batch {file.global_batch}"
        expected = "a micro_batch that divides global_batch"
        document.raise_problems(
            [problem_at(document, ("micro_batch",), message, expected=expected)]
        )
    return TrainingSpec(**file.model_dump(exclude={"schema_version", "kind"}))
