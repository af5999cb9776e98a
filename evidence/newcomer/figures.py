"""The table of the page."""


def steps(lab):
    ways = {name: lab.load(name) for name in ("wheel", "clone")}
    if None in ways.values():
        return None
    seconds = {name: [step["seconds"] for step in way["steps"]] for name, way in ways.items()}
    total = {name: sum(found) for name, found in seconds.items()}
    return {"seconds": seconds, "total": total, "images": ways["clone"]["photographs"]}


SECTIONS = (steps,)
