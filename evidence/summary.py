"""The page of all subjects: what was found, in a sentence each."""

import os

from . import ROOT, pages
from .clusters import figures as clusters
from .finetuning import figures as finetuning
from .imagenet import figures as imagenet
from .pages import estimate

SHOWN = ("standard 1", "standard 2", "standard 5", "standard 6", "q95 4", "q95 6", "q95 8")


def networks(lab):
    found = imagenet.seen(lab.beside("imagenet"))
    if found is None or len(found.networks) < 2:
        return None
    rows = [
        {
            "name": name,
            "kb": found.bytes[name] / 1e3,
            "times": found.fewer(name),
            "cells": " | ".join(
                _accuracy(found.plain(network), name) for network in found.networks
            ),
        }
        for name in (*SHOWN, "resized full", "source full")
    ]
    return {"rows": rows, "count": len(found.plain("lite0")["source full"])}


def _accuracy(marks, name):
    gap = imagenet.gap(marks[name], marks["source full"])
    return f"{imagenet.share(marks[name]):.1fm} ({gap:+.1f})"


def coarse(lab):
    found = imagenet.coarse(lab.beside("imagenet"))
    names = found and [
        f"{best['label']} `{best['name']}` ({best['times']:.1f}x fewer bytes)"
        for best in found["first"]
    ]
    return names and {"first": ", for ".join(names)}


def tails(lab):
    lab = lab.beside("finetuning")
    tasks = finetuning.tasks_of(lab.rows())
    if not tasks:
        return None
    link = lab.load("link") or {}
    rows = []
    for task, found in tasks.items():
        epochs = link.get(task, {}).get("epochs", {})
        for trained in dict.fromkeys((found.cheapest_scan(), "tuner", "full")):
            shorter = None
            if trained in epochs:
                shorter = f"{epochs['full']['seconds'] / epochs[trained]['seconds']:.1f}x"
            rows.append(
                {
                    "task": task,
                    "name": finetuning.name(trained),
                    "times": found.fewer(trained),
                    "final": estimate(found.final(trained).values()),
                    "minus": found.minus(trained),
                    "shorter": shorter,
                }
            )
    layers = [
        f"{net}: On average {finetuning.findings(found)}."
        for net, found in finetuning.networks(lab).items()
    ]
    return {"rows": rows, "layers": " ".join(layers), **finetuning.switched(tasks)}


def probes(lab):
    results = lab.beside("finetuning").load("transfer")
    if results is None:
        return None
    best = {task: finetuning.cheapest_probe(row) for task, row in results.items()}
    said = [
        f"{task}: scan {found[0]}, {found[1]:.1f}x fewer bytes"
        if found
        else f"{task}: no scan within a point"
        for task, found in best.items()
    ]
    return {"first": "; ".join(said), "adapted": finetuning.probes(results)}


SECTIONS = {
    "networks": networks,
    "coarse": coarse,
    "tails": tails,
    "probes": probes,
    "clusters": lambda lab: clusters.validation(lab.beside("clusters")),
}


def render(lab):
    """Write the overview, if all of its subjects were measured."""
    values = pages.collect(lab, SECTIONS)
    template = os.path.join(ROOT, "evidence", "page.md")
    pages.write(template, os.path.join(lab.root, "README.md"), values)
