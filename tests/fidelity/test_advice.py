"""What measured figures say: the rate of a job, the scan to take, and the table of them."""

from pcrshard.fidelity import advice


def row(scan, size, msssim, top1=None, *, half=0.001, images=600):
    """Figures of a scan, whose intervals are ``half`` to each side."""
    return advice.ScanFidelity(
        scan,
        bytes_per_image=size,
        saving=100 / size,
        msssim=msssim,
        msssim_interval=(msssim - half, msssim + half),
        msssim_quartile=msssim - 0.01,
        psnr=30.0,
        decode_seconds=0.001,
        num_images=images,
        top1=top1,
        top1_change=None if top1 is None else (top1 - 0.75 - half, top1 - 0.75 + half),
    )


def test_recommend_takes_the_lowest_scan_that_is_enough():
    """It and all higher scans pass, in whatever order they were measured."""
    rows = [row(1, 10, 0.8), row(2, 20, 0.94), row(5, 50, 0.985), row(10, 99, 1.0)]
    enough = "the lowest with a mean MS-SSIM of 0.95 or more"
    assert advice.recommend(rows) == (5, enough, 5, None)
    assert advice.recommend(rows, 0.9).scan == 2
    assert advice.recommend(rows[::-1], 0.7).scan == 1
    found = advice.recommend(rows[:2])
    assert found == ("full", "no scan has a mean MS-SSIM of 0.95 or more", "full", None)


def test_a_network_decides_where_there_is_one():
    """The scan from which on it loses no more than a point; a lucky lower one does not count."""
    tops = {1: 0.75, 2: 0.60, 5: 0.745, 10: 0.75}
    rows = [row(scan, 10 * scan, 0.9, top) for scan, top in tops.items()]
    found = advice.recommend(rows)
    assert found.scan == 5
    assert "at most 1 point below the 75.0% of your network at scan 10" in found.reason


def test_few_images_cannot_tell():
    """Advice on noise says so: which scans are open, how many images would tell, what is safe."""
    tops = {1: 0.745, 2: 0.60, 4: 0.74, 5: 0.748, 8: 0.75, 10: 0.75}
    rows = [row(scan, 10 * scan, 0.9, top, half=0.02) for scan, top in tops.items()]
    rows[4] = row(8, 80, 0.9, 0.75, half=0.004)
    found = advice.recommend(rows)
    assert (found.scan, found.lowest, found.images) == (8, 4, 60_000)
    assert found.reason.startswith(
        "cannot tell from 600 images: between scans 4 and 8, about 60,000 would do; scan 8 "
    )
    # More of the same would do.
    sure = [row(scan, 10 * scan, 0.9, top, half=0.0005) for scan, top in tops.items()]
    assert advice.recommend(sure[:2] + sure[3:]).scan == 5


def test_the_network_itself_is_questioned():
    """A network without its normalization has figures, too: the user is asked about the top."""
    assert advice.accuracy_question([row(1, 10, 0.8)]) is None
    question = advice.accuracy_question([row(1, 10, 0.8, 0.3), row(10, 99, 1.0, 0.31)])
    assert question.startswith("is 27.4% to 34.8% (at scan 10) the accuracy that you know")


def test_a_network_that_knows_nothing_recommends_nothing():
    """Answers that hardly depend on the image do not change with the scan either: with its
    normalization forgotten, a network of five classes is right on a fifth of the images.
    """
    rows = [row(scan, 10 * scan, 0.9, 0.218)._replace(top1_constant=0.2) for scan in (1, 5, 10)]
    rows = [each._replace(top1_change=(-0.001, 0.001)) for each in rows]
    found = advice.recommend(rows)
    assert (found.scan, found.images) == ("full", None)
    assert "18.7% to 25.3%" in found.reason
    assert "20.0% of one answer" in found.reason
    assert advice.recommend([each._replace(top1=0.55) for each in rows]).scan == 1
    # All images are of one class: that says nothing.
    assert advice.recommend([each._replace(top1_constant=1.0) for each in rows]).scan == 1


def test_throughput_is_theorem_4_1_until_decoding_is_the_limit():
    """X = W / E[s], at most cores / decoding time."""
    rows = [row(1, 10, 0.8)]
    assert "limit" not in advice.with_throughput(rows)[0]
    for cores, expected, limit in ((1, 500, "bandwidth"), (0.25, 250, "decoding")):
        (found,) = advice.with_throughput(rows, 5000, cores)
        assert (found["images_per_second"], found["limit"]) == (expected, limit)
