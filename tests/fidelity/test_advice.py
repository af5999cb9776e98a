"""What measured figures say: the rate of a job, the scan to take, and the table of them."""

from pcrshard.fidelity import advice


def row(scan, size, msssim, seconds=0.001):
    quartiles = advice.Quartiles(msssim - 0.01, msssim, msssim)
    return advice.ScanFidelity(
        scan,
        size,
        100 / size,
        advice.Quartiles(size, size, size),
        msssim,
        quartiles,
        30.0,
        seconds,
        8,
    )


def test_recommend_takes_the_lowest_scan_that_is_enough():
    """With a sentence that names the next lower one."""
    rows = [row(1, 10, 0.8), row(2, 20, 0.94), row(5, 50, 0.985), row(10, 99, 1.0)]
    found = advice.recommend(rows)
    assert found.scan == 5
    assert found.reason == (
        "the lowest with a mean MS-SSIM of 0.95 or more: scan 5 has MS-SSIM 0.985 (a quarter of "
        "the images below 0.975) at 2.00 times fewer bytes than full; below: scan 2 has MS-SSIM "
        "0.940 (a quarter of the images below 0.930) at 5.00 times fewer bytes than full"
    )
    assert advice.recommend(rows, 0.9).scan == 2
    assert advice.recommend(rows[:2]).scan == "full"
    assert "best: scan 2 has MS-SSIM 0.940" in advice.recommend(rows[:2]).reason
    assert advice.recommend(rows[::-1], 0.8).scan == 1


def test_throughput_is_theorem_4_1_until_decoding_is_the_limit():
    """X = W / E[s], at most cores / decoding time."""
    assert advice.throughput(row(1, 10, 0.8), 5000) == (500, "bandwidth")
    assert advice.throughput(row(1, 10, 0.8), 5000, cores=0.25) == (250, "decoding")


def test_the_table_has_a_line_for_each_scan():
    """The table shows images per second only if a bandwidth is given."""
    rows = [row(1, 10, 0.8), row(10, 99, 1.0)]
    text = advice.fidelity_table(rows)
    assert text.count("\n") == 2
    assert text.splitlines()[1].split() == ["1", "10", "B", "10", "0.8", "30", "1", "ms"]
    assert "images per second" not in text
    assert "decoding" in advice.fidelity_table(rows, 1e6, cores=2)


def test_a_network_decides_where_there_is_one():
    """The scan from which on it loses no more than a point; a lucky lower one does not count."""
    tops = [0.75, 0.60, 0.74, 0.75]
    rows = [
        row(scan, size, 0.9)._replace(top1=top, reference_top1=0.75, num_images=400)
        for scan, size, top in zip((1, 2, 5, 10), (10, 20, 50, 99), tops, strict=True)
    ]
    found = advice.recommend(rows)
    assert found.scan == 5
    assert "at most 1 points below its 75.0 % at full: scan 5 has top-1 74.0 %" in found.reason
    assert "measure more" not in found.reason
    assert advice.recommend(rows[:2]).scan == "full"
