"""Reinforcement learning: actors play and send the frames they saw as NumPy arrays, and a learner trains on them.

    worker0 ---- weights ---------------------> worker1, worker2, ...
            <--- frames, actions, rewards -----

A frame shows a ball and a paddle. The right action moves the paddle to the side where the ball is. Frames travel as
arrays of bytes, without being pickled.
"""

import argparse

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributions import Categorical

import torch_ucx_rpc
from torch_ucx_rpc import services

SIZE = 32
LEFT, STAY, RIGHT = range(3)


def make_policy():
    return nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, 3))


def as_input(frames):
    return torch.from_numpy(frames).float() / 255


class Actor:
    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.policy = make_policy()

    def play(self, weights, steps):
        """Return frames (steps, SIZE, SIZE) of uint8, actions (steps,) and rewards (steps,)."""
        self.policy.load_state_dict(weights)
        balls, paddles = self.random.integers(SIZE, size=(2, steps))
        frames = np.zeros((steps, SIZE, SIZE), dtype=np.uint8)
        frames[np.arange(steps), 0, balls] = 255
        frames[np.arange(steps), -1, paddles] = 255
        with torch.no_grad():
            actions = Categorical(logits=self.policy(as_input(frames))).sample().numpy()
        rewards = (actions == np.sign(balls - paddles) + STAY).astype(np.float32)
        return frames, actions, rewards


def learn(arguments):
    torch.manual_seed(0)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    workers = [member for member in services.members() if member.rank > 0]
    actors = [rpc.remote(worker.name, Actor, (worker.rank,)) for worker in workers]
    received = 0
    for number in range(1, arguments.rounds + 1):
        weights = policy.state_dict()
        futures = [actor.rpc_async().play(weights, arguments.steps) for actor in actors]
        frames, actions, rewards = (
            np.concatenate(parts) for parts in zip(*torch.futures.wait_all(futures), strict=True)
        )
        received += frames.nbytes
        choices = Categorical(logits=policy(as_input(frames)))
        advantages = torch.from_numpy(rewards - rewards.mean())
        optimizer.zero_grad()
        (-choices.log_prob(torch.from_numpy(actions)) * advantages).mean().backward()
        optimizer.step()
        if number in (1, arguments.rounds) or number % 20 == 0:
            print(f"round {number}: {frames.dtype} frames {frames.shape}, reward {rewards.mean():.2f}", flush=True)
    print(f"{len(actors)} actors sent {received / 2**20:.0f} MiB of frames")


def main():
    parser = argparse.ArgumentParser(description="Worker 0 learns from the frames that all other workers play.")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--steps", type=int, default=256, help="frames of an actor in a round")
    arguments = parser.parse_args()

    torch_ucx_rpc.init_rpc()
    if rpc.get_worker_info().id == 0:
        learn(arguments)
    # The actors wait here, and play for the learner, until it has also called shutdown().
    rpc.shutdown()


if __name__ == "__main__":
    main()
