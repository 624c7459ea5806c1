"""An interrupt and a full disk are found however deep a library wrapped them."""

from __future__ import annotations

import errno

import pytest

from edge_convert.convert.interrupt import raise_if_disk_full, raise_if_interrupted


def wrapped(inner: BaseException, *, explicit: bool) -> Exception:
    """A RuntimeError two steps above `inner`, raised from it or while it was handled."""
    try:
        try:
            try:
                raise inner
            except BaseException as error:  # noqa: BLE001
                raise ValueError("middle") from (error if explicit else None)
        except ValueError:
            raise RuntimeError("outer")  # noqa: B904
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("explicit", [True, False])
def test_an_interrupt_is_found(explicit: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        raise_if_interrupted(wrapped(KeyboardInterrupt(), explicit=explicit))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found(number: int) -> None:
    with pytest.raises(OSError, match="full") as found:
        raise_if_disk_full(wrapped(OSError(number, "full"), explicit=True))
    assert found.value.errno == number


def test_a_full_disk_in_words_only() -> None:
    with pytest.raises(OSError, match="No space") as found:
        raise_if_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert found.value.errno == errno.ENOSPC


def test_other_errors_pass() -> None:
    error = wrapped(OSError(errno.EACCES, "denied"), explicit=True)
    error.__context__ = error  # a loop must end
    raise_if_interrupted(error)
    raise_if_disk_full(error)
