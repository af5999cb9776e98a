"""The user's functions for the files of a shard: what they raise goes to the handler."""

import pytest
import webdataset as wds


def dataset_of(urls, **options):
    return wds.WebDataset(urls, shardshuffle=False, **options)


@pytest.mark.parametrize("which", ["select_files", "rename_files", "both"])
def test_what_the_users_functions_raise_goes_to_the_handler(shard_urls, which):
    """An error of select_files or rename_files costs the rest of its shard, and is raised if no
    handler says otherwise.
    """

    def refuse(name):
        if "3.jpg" in name:
            raise RuntimeError(name)
        return name

    names = ("select_files", "rename_files") if which == "both" else (which,)
    functions = dict.fromkeys(names, refuse)
    with pytest.warns(UserWarning, match=r"3\.jpg"):
        found = list(dataset_of(shard_urls, handler=wds.warn_and_continue, **functions).pcr_scan(2))
    whole = list(dataset_of(shard_urls).pcr_scan(2))
    keys = [sample["__key__"] for sample in found]
    assert keys == [sample["__key__"] for sample in whole if sample["__key__"] in keys]
    assert 0 < len(keys) < len(whole)
    with pytest.raises(RuntimeError):
        list(dataset_of(shard_urls, **functions).pcr_scan(2))
