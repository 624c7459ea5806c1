"""The bundle's tokenizer, opened with the errors of this project."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_convert.runtime.errors import BundleError, MissingExtraError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from edge_convert.runtime.bundle import Bundle


def load_tokenizer(bundle: Bundle, name: str) -> Tokenizer:
    """The tokenizer in the bundle's file `name`; BundleError if it is none."""
    path = bundle.file(name)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError("tokenizers", "cpu") from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise BundleError(f"{name} is not a tokenizer: {reason}. Convert the model again.") from error
