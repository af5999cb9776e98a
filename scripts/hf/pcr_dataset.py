"""Loading script of `datasets` before 4, which needs pcrshard installed; newer ones run no scripts:
use pcrshard.hf.load_dataset.

datasets.load_dataset("scripts/hf/pcr_dataset.py", trust_remote_code=True, data_dir="shards",
scan=5, split="train", streaming=True)
"""

import pcrshard.hf


class PcrDataset(pcrshard.hf.PcrBuilder):
    """`datasets` looks for a builder that is defined in the script itself."""
