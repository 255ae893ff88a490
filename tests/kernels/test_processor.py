"""What /proc/cpuinfo says of a processor."""

import pytest

from weft.kernels import processor


@pytest.mark.parametrize(
    ("text", "maker", "native"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 fma\nbugs: bf16\n" * 2, "AuthenticAMD", False),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512_bf16\n", "AuthenticAMD", True),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu amx_bf16 amx_tile\n", "GenuineIntel", True),
        ("Features\t: asimd bf16 i8mm\n", None, True),
        ("Features\t: asimd\n", None, False),
        (None, None, None),
    ],
)
def test_processors(text, maker, native, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(processor, "Path", lambda _: file)
    monkeypatch.setattr(processor, "features", processor.features.__wrapped__)
    assert processor.vendor.__wrapped__() == maker
    assert processor.multiplies_bfloat16() is native
