"""What a search of scan scripts asks of prefixes of photographs: how they look, or what a network
makes of them.
"""

import os
import sys

import numpy as np
from common import ROOT

import pcrshard
from pcrshard.fidelity.msssim import Reference
from pcrshard.jpeg.pixels import decode_image, image_size

sys.path.insert(0, os.path.join(ROOT, "scripts"))

SIDE = 256  # The middle of a photograph tells as much about a script as all of it.
END = b"\xff\xd9"
BATCH = 65


# MS-SSIM and weight: even from 0.90 to 0.99, and something at both ends, for the tasks that need
# less and those that need nearly all.
LIKENESSES = {round(0.9 + i / 1000, 3): 1 for i in range(91)} | dict.fromkeys(
    (0.80, 0.85, 0.9925, 0.995, 0.9975, 0.999), 4
)
# Probability over that of whole photographs, and weight.
PROBABILITIES = {round(0.8 + i / 200, 3): 1 for i in range(40)}


class Likeness:
    """MS-SSIM against the whole photograph."""

    targets = LIKENESSES
    # Standard is good from here on.
    good = 0.985
    name = "MS-SSIM"

    def __init__(self):
        self.crops = []
        self.references = []

    def add(self, jpeg, _path):
        """One photograph more."""
        height, width = image_size(jpeg)
        side = min(height, width, SIDE)
        crop = ((height - side) // 2, (width - side) // 2, side, side)
        self.crops.append(crop)
        self.references.append(Reference(decode_image(jpeg, crop=crop)))

    def values(self, prefixes):
        """One for each photograph, of its pieces."""
        return [
            reference.compare(decode_image(pieces, crop=crop))
            for pieces, crop, reference in zip(prefixes, self.crops, self.references, strict=True)
        ]


class Recognition:
    """The probability that a network of ImageNet gives to what is shown, over its mean for whole
    photographs: a top-1 accuracy without steps, which a search can follow.
    """

    targets = PROBABILITIES
    good = np.inf
    name = "relative probability"

    def __init__(self):
        sys.path.insert(0, ROOT)
        from evidence import lites
        from evidence.imagenet import photographs

        self.classify = lites.Classifier(lites.pretrained("lite0"))
        self.decoder = pcrshard.ImageDecoder(224, "center")
        self.numbers = {name: number for number, name in enumerate(photographs.synsets())}
        self.labels = []
        self.whole = []

    def add(self, jpeg, path):
        """One photograph more, whose name begins with its synset."""
        self.labels.append(self.numbers[os.path.basename(path)[:9]])
        self.whole.append(jpeg)

    def values(self, prefixes):
        """One for each photograph, of its pieces."""
        if isinstance(self.whole, list):
            pictures = [self.decoder(jpeg, None) for jpeg in self.whole]
            self.whole = float(np.mean(self.see(pictures)[1]))
        pictures = [self.decoder(b"".join(pieces) + END, None) for pieces in prefixes]
        return self.see(pictures)[1] / self.whole

    def see(self, pictures):
        """(recognised or not, probability of what is shown) of each picture."""
        labels = np.array(self.labels)
        scores = np.concatenate(
            [
                self.classify(np.stack(pictures[start : start + BATCH])).softmax(1).numpy()
                for start in range(0, len(pictures), BATCH)
            ]
        )
        return scores.argmax(1) == labels, scores[np.arange(len(labels)), labels]


OBJECTIVES = {"msssim": Likeness, "top1": Recognition}
