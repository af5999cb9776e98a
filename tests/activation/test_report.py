"""The figures for people."""

import torch

from pcrshard.activation.report import Layer, Report
from pcrshard.activation.stored import Row


def test_a_report_adds_up_and_reads_well():
    """Memory first, each tensor once, exact ones counted but not listed."""
    rows = [
        Row("1", "lossy", (8, 4), torch.float32, 8_000_000, 1_000_000, 0.05, 1.0, 0.1, 0.2),
        Row("2", "exact", (8,), torch.float32, 1_000_000, 1_000_000),
        Row("3", "lossless", (8, 2), torch.int64, 1_000_000, 250_000, 0.0, 0.0, 0.1, 0.0),
    ]
    report = Report(2_500_000, 0, None, rows, [Layer("conv", 0.05, 0.001, 0.0011)])
    assert report.raw_bytes == 10_000_000
    assert report.stored_bytes == 2_250_000
    assert round(report.ratio, 2) == 4.44
    assert round(report.seconds, 3) == 0.4
    text = str(report)
    assert text.splitlines()[0] == "peak of compressed bytes: 2.5 MB"
    assert "10.0 MB in 2.2 MB, 4.44 times less" in text
    assert "1 8x4" in text
    assert "3 8x2" in text
    assert "2 8 " not in text
    assert "0.0011" in text
    accelerator = str(Report(0, 0, 5_000_000, [], note="beware"))
    assert accelerator.splitlines()[:2] == ["beware", "peak of the accelerator's memory: 5.0 MB"]
