"""The user's functions for the files of a shard: what they raise goes to the handler."""

import pytest
import webdataset as wds


def dataset_of(urls, **options):
    return wds.WebDataset(urls, shardshuffle=False, **options)


@pytest.mark.parametrize("go_on", [True, False])
@pytest.mark.parametrize("which", ["select_files", "rename_files", "both"])
def test_what_the_users_functions_raise_goes_to_the_handler(shard_urls, plain_tars, which, go_on):
    """An error of select_files or rename_files costs one file, or the rest of its shard.

    The handler decides, as for the original tars.
    """
    found = []
    for urls in (plain_tars, shard_urls):
        errors = []

        def refuse(name):
            if "3.jpg" in name or "7.cls" in name:
                raise RuntimeError(name)
            return name

        functions = {"select_files": refuse, "rename_files": refuse}
        how = functions if which == "both" else {which: functions[which]}
        ds = dataset_of(
            urls, handler=lambda error, errors=errors: errors.append(error) or go_on, **how
        )
        samples = list(ds if urls is plain_tars else ds.pcr_scan(10))
        found.append(
            (
                [(s["__key__"], sorted(s)) for s in samples],
                [error.args[0].partition(" @ ")[0] for error in errors],
            )
        )
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize("which", ["select_files", "rename_files"])
def test_what_the_users_functions_raise_ends_the_job_by_default(shard_urls, which):
    """Without a handler it is raised as it is."""
    with pytest.raises(ZeroDivisionError):
        list(dataset_of(shard_urls, **{which: lambda name: 1 / 0}).pcr_scan(2))
