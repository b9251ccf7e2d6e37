"""Bounds that no model of this world exceeds, for what single fields cannot tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from profiles.errors import InputError, Problem

if TYPE_CHECKING:
    from profiles.model import ModelSpec
    from profiles.yamlfile import Document, Place

__all__ = ["MAX_PARAMETERS", "refuse_absurd"]

MAX_PARAMETERS: Final = 10**15


def refuse_absurd(model: ModelSpec, document: Document, place: Place) -> None:
    """Raise ``InputError`` for a model whose fields are each possible and together are not."""
    if model.params_total > MAX_PARAMETERS:
        raise InputError(
            Problem(
                where=document.where(place),
                message=f"the layers have {model.params_total:,} parameters together",
                expected=f"at most {MAX_PARAMETERS:,}",
            )
        )
