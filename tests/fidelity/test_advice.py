"""What measured figures say: the rate of a job, the scan to take, and the table of them."""

from pcrshard.fidelity import advice


def row(scan, size, msssim, top1=None):
    return advice.ScanFidelity(
        scan,
        bytes_per_image=size,
        saving=100 / size,
        msssim=msssim,
        msssim_quartile=msssim - 0.01,
        psnr=30.0,
        decode_seconds=0.001,
        num_images=8,
        top1=top1,
    )


def test_recommend_takes_the_lowest_scan_that_is_enough():
    """It and all higher scans pass, in whatever order they were measured."""
    rows = [row(1, 10, 0.8), row(2, 20, 0.94), row(5, 50, 0.985), row(10, 99, 1.0)]
    assert advice.recommend(rows) == (5, "the lowest with a mean MS-SSIM of 0.95 or more")
    assert advice.recommend(rows, 0.9).scan == 2
    assert advice.recommend(rows[::-1], 0.8).scan == 1
    assert advice.recommend(rows[:2]) == (
        "full",
        "no scan measured has a mean MS-SSIM of 0.95 or more",
    )


def test_a_network_decides_where_there_is_one():
    """The scan from which on it loses no more than a point; a lucky lower one does not count."""
    tops = {1: 0.75, 2: 0.60, 5: 0.74, 10: 0.75}
    rows = [row(scan, 10 * scan, 0.9, top) for scan, top in tops.items()]
    found = advice.recommend(rows)
    assert found.scan == 5
    assert "at most 1 point below the 75.0% of your network at scan 10" in found.reason


def test_throughput_is_theorem_4_1_until_decoding_is_the_limit():
    """X = W / E[s], at most cores / decoding time."""
    rows = [row(1, 10, 0.8)]
    assert "limit" not in advice.with_throughput(rows)[0]
    for cores, expected, limit in ((1, 500, "bandwidth"), (0.25, 250, "decoding")):
        (found,) = advice.with_throughput(rows, 5000, cores)
        assert (found["images_per_second"], found["limit"]) == (expected, limit)
