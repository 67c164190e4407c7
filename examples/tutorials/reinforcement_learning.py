"""Reinforcement learning: an agent with the policy, and observers that ask it what to do in their environments."""

import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributions import Categorical

OBSERVERS = 2
EPISODES = 25
STEPS = 20


class Signs:
    """Shows a number. The right action, 1 if the number is positive and 0 otherwise, has the reward 1."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)

    def reset(self):
        self.state = torch.randn(1, generator=self.random)
        return self.state

    def step(self, action):
        reward = float(action == int(self.state.item() > 0))
        return self.reset(), reward


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id
        self.environment = Signs(seed=self.id)

    def run_episode(self, agent_rref):
        state = self.environment.reset()
        for _ in range(STEPS):
            action = agent_rref.rpc_sync().select_action(self.id, state)
            state, reward = self.environment.step(action)
            agent_rref.rpc_sync().report_reward(self.id, reward)


class Agent:
    def __init__(self, world_size):
        torch.manual_seed(0)
        self.rref = rpc.RRef(self)
        self.observers = [rpc.remote(f"observer_{rank}", Observer) for rank in range(1, world_size)]
        self.policy = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.forget_episode()

    def forget_episode(self):
        self.log_probabilities = {rank: [] for rank in range(1, 1 + OBSERVERS)}
        self.rewards = {rank: [] for rank in range(1, 1 + OBSERVERS)}

    def select_action(self, observer_id, state):
        choices = Categorical(logits=self.policy(state))
        action = choices.sample()
        self.log_probabilities[observer_id].append(choices.log_prob(action))
        return action.item()

    def report_reward(self, observer_id, reward):
        self.rewards[observer_id].append(reward)

    def run_episode(self):
        futures = [observer.rpc_async(timeout=0).run_episode(self.rref) for observer in self.observers]
        torch.futures.wait_all(futures)

    def finish_episode(self):
        log_probabilities = torch.stack([p for of_one in self.log_probabilities.values() for p in of_one])
        rewards = torch.tensor([r for of_one in self.rewards.values() for r in of_one])
        self.forget_episode()
        self.optimizer.zero_grad()
        (-log_probabilities * (rewards - 0.5)).mean().backward()
        self.optimizer.step()
        return rewards.mean().item()


def run(rank, world_size):
    torch.set_num_threads(1)
    rpc.init_rpc("agent" if rank == 0 else f"observer_{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        agent = Agent(world_size)
        rewards = []
        for _ in range(EPISODES):
            agent.run_episode()
            rewards.append(agent.finish_episode())
        assert sum(rewards[-3:]) / 3 > 0.8, rewards
        print("the agent has learned")
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run, args=(1 + OBSERVERS,), nprocs=1 + OBSERVERS)
