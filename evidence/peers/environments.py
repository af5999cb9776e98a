"""One virtual environment for each peer, in a cache folder; the versions that were measured."""

import functools
import os
import subprocess
import sys

PIL = "pillow==13.0.0"
TUNED = ("simplejpeg==1.9.0", "opencv-python-headless==5.0.0.93")
# torchvision and its torch are one environment for three peers, because it has five gigabytes.
ENVIRONMENTS = {
    "pcrshard": None,  # the one that this runs in
    "torch": ["torch==2.13.0", "webdataset==1.0.2", PIL, *TUNED],
    "torchvision": [
        "torch==2.14.1",
        "torchvision==0.29.1",
        "torchcodec==0.17.0",
        "mosaicml-streaming==0.13.0",
        *TUNED,
    ],
    "energon": ["torch==2.13.0", "megatron-energon==7.4.1", PIL, *TUNED],
    "litdata": ["torch==2.13.0", "litdata==0.2.76", "boto3", PIL, *TUNED],
    "hf": ["torch==2.13.0", "datasets==5.2.0", PIL, "aiohttp", "requests"],
    "tensorflow": ["tensorflow-cpu==2.21.0"],
    "grain": ["grain==0.2.18", PIL, *TUNED],
    "spdl": ["spdl==0.8.0", "spdl-io==0.8.0", "numpy"],
    "dali": ["nvidia-dali-cuda120==2.4.0", "numpy"],
    # Compiled here: needs libopencv-dev, libturbojpeg0-dev and a C++ compiler.
    "ffcv": ["torch==2.13.0", "ffcv==1.0.2", "numba", "opencv-python-headless", PIL],
}


@functools.cache
def python_of(name, cache):
    """The Python of an environment, which is made if it is not there; None if that fails."""
    packages = ENVIRONMENTS[name]
    if packages is None:
        return sys.executable
    folder = os.path.join(cache, name)
    python = os.path.join(folder, "bin", "python")
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *packages],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            os.rename(folder, f"{folder}.failed")
            return None
    return python
