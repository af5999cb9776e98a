#!/usr/bin/env python3
"""Train a small policy in one process and serve it from another, by weight sync.

python scripts/weight_sync.py train STREAM &
python scripts/weight_sync.py serve STREAM FOLDER
"""

import argparse

import torch

from pcrshard.weightsync import WeightMirror, WeightPublisher

CONTEXTS, ACTIONS, STEPS = 16, 4, 60


def make_policy():
    """Return the policy network: from a context to the logits of the actions."""
    return torch.nn.Sequential(
        torch.nn.Embedding(CONTEXTS, 64), torch.nn.ReLU(), torch.nn.Linear(64, ACTIONS)
    )


def train(url):
    """Train with REINFORCE; publish the rounded weights after each step."""
    torch.manual_seed(0)
    policy = make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    publisher = WeightPublisher(url)
    for _ in range(STEPS):
        contexts = torch.randint(CONTEXTS, (256,))
        actions = torch.distributions.Categorical(logits=policy(contexts))
        chosen = actions.sample()
        rewards = (chosen == contexts % ACTIONS).float()
        loss = -(actions.log_prob(chosen) * (rewards - rewards.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights = {name: tensor.bfloat16() for name, tensor in policy.state_dict().items()}
        number = publisher.publish(weights)
        print(f"published step {number}, mean reward {rewards.mean():.2f}", flush=True)


def serve(url, folder):
    """Answer with the newest policy, whose weights change in place."""
    mirror = WeightMirror(url, folder)
    mirror.wait(newer_than=0, timeout=60)
    policy = make_policy().bfloat16()
    policy.load_state_dict(mirror.tensors(), assign=True)  # the mirror's memory, not a copy
    contexts = torch.arange(CONTEXTS)
    while True:
        with torch.no_grad():
            right = (policy(contexts).argmax(1) == contexts % ACTIONS).float().mean()
        print(f"serving step {mirror.step}, {right:.0%} of answers right", flush=True)
        if mirror.step >= STEPS:
            return
        mirror.wait(timeout=60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=("train", "serve"))
    parser.add_argument("stream", help="folder or URL of the steps")
    parser.add_argument("folder", nargs="?", default="served", help="the server's own folder")
    args = parser.parse_args()
    if args.role == "train":
        train(args.stream)
    else:
        serve(args.stream, args.folder)


if __name__ == "__main__":
    main()
