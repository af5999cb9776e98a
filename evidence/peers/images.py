"""What every peer does with an image: the same random crop, in a plain form and in a tuned one."""

import io
import math
import random

import numpy as np

SIDE = 224
BATCH = 32


def draw_box(height, width):
    """(y, x, height, width) as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def crop_picture(picture):
    """Of a Pillow image: crop and resize at once, to (224, 224, 3)."""
    from PIL import Image

    picture = picture if picture.mode == "RGB" else picture.convert("RGB")
    y, x, h, w = draw_box(picture.height, picture.width)
    box = (x, y, x + w, y + h)
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))


def decode_plain(jpeg):
    """As most people write it: Pillow."""
    from PIL import Image

    with Image.open(io.BytesIO(jpeg)) as picture:
        return crop_picture(picture)


def decode_tuned(jpeg):
    """As a patient person writes it: simplejpeg, which scales while it decodes, and OpenCV."""
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)
    height, width, *_ = simplejpeg.decode_jpeg_header(jpeg)
    y, x, h, w = draw_box(height, width)
    # The smallest picture in which the crop still has as many pixels as the result.
    pixels = simplejpeg.decode_jpeg(
        jpeg,
        "RGB",
        min_height=math.ceil(height * SIDE / h),
        min_width=math.ceil(width * SIDE / w),
        min_factor=1,
    )
    scale = pixels.shape[0] / height
    top, left = int(y * scale), int(x * scale)
    part = pixels[top : top + max(1, int(h * scale)), left : left + max(1, int(w * scale))]
    return cv2.resize(part, (SIDE, SIDE), interpolation=cv2.INTER_AREA)


def batches_of(samples):
    """Lists of (pixels, label) as arrays, in a loader's worker."""
    pixels, labels = zip(*samples, strict=True)
    return np.stack(pixels), np.array(labels)


def torch_batches(dataset, workers, loader=None, **options):
    """The pixels of the batches of the loader that PyTorch users have, or of another one."""
    import torch

    torch.set_num_threads(1)
    how = {"batch_size": BATCH, "num_workers": workers, "collate_fn": batches_of} | options
    for pixels, _ in (loader or torch.utils.data.DataLoader)(dataset, **how):
        yield pixels
