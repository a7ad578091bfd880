"""What each trick of the fast DQN is worth: rows of ``leanrl.tools.ablate``.

At the default hyperparameters, with CartPole-v1's sizes, on one thread as the script.
"""

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import torch

import leanrl.dqn_torchcompile as fast
from leanrl.support.optim import Adam
from leanrl.support.replay import Replay
from leanrl.tools.ablate_off_policy import NUM_UPDATES, flat, same_way, state_tensors
from leanrl.tools.ablation import CPU, Group, Side, compiled, pair, row_of

DQN = Group(
    "DQN, CartPole-v1", "Transitions: ten environment steps and their update. The action: one environment step."
)


class Dqn:
    """What the fast ``main`` makes before its loop, the replay full; ``num_staged`` steps fit in its staging."""

    def __init__(self, num_staged: int) -> None:
        obs_dim, num_actions = 4, 2
        self.args = args = fast.Args(compile=True)
        rng = np.random.default_rng(0)
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.q_network = fast.QNetwork(obs_dim, num_actions)
        optimizer = Adam(self.q_network.parameters(), lr=args.learning_rate)
        self.replay = Replay(args.buffer_size, obs_dim, 1, CPU)
        rows = torch.from_numpy(rng.normal(size=(args.buffer_size, 2 * obs_dim + 3)))
        rows[:, 2 * obs_dim] = torch.from_numpy(rng.integers(num_actions, size=args.buffer_size))
        rows[:, -1] = 0.0
        self.replay.load_state_dict({"rows": rows, "cursor": torch.zeros(1, dtype=torch.int64)})
        self.staging = fast.Staging(num_staged, 1, obs_dim, CPU)
        update, losses = fast.make_update(self.q_network, deepcopy(self.q_network), optimizer, self.replay, args)
        executables = fast.make_executables(self.q_network, self.replay, self.staging, update, args)
        self.greedy, self.learn, self.update = executables
        self.touched = [*self.q_network.parameters(), *state_tensors(optimizer), *self.replay.tensors(), *losses]
        self.obs = rng.normal(size=(100, 1, obs_dim)).astype(np.float32)


@row_of(DQN)
def dqn_staging():
    """Ten environment steps and the update that then is due."""
    num_staged = round(1 / fast.Args.updates_per_step)

    def learning(parts: Dqn, round_: Callable) -> Side:
        start = flat(parts.q_network.parameters())
        action, reward, ended = np.ones(1, np.int64), np.ones(1), np.zeros(1, bool)
        steps = [(x, y, action, reward, ended, ended) for x, y in itertools.pairwise(parts.obs)][:num_staged]

        def results():
            yield flat(parts.q_network.parameters()) - start
            yield parts.replay.rows

        def burst():
            torch.default_generator.manual_seed(0)
            with torch.enable_grad():
                for _ in range(NUM_UPDATES):
                    round_(steps)
            return results()

        return Side(burst, NUM_UPDATES * num_staged, NUM_UPDATES, parts.touched)

    def at_once() -> Side:
        parts = Dqn(num_staged)

        def round_(steps: Sequence) -> None:
            for step in steps:
                parts.staging.add(*step)
            parts.learn(parts.staging.take())

        return learning(parts, round_)

    def one_by_one() -> Side:
        parts = Dqn(1)
        write = compiled()(lambda row: parts.replay.add(*parts.staging.split(row)))

        def round_(steps: Sequence) -> None:
            for step in steps:
                parts.staging.add(*step)
                write(parts.staging.take())
            parts.update()

        return learning(parts, round_)

    yield same_way("transitions written ten at a time, with the update", one_by_one(), at_once())


@row_of(DQN)
def dqn_sums():
    parts = Dqn(1)

    def acting(greedy: Callable) -> Side:
        def burst():
            return [torch.cat([greedy(torch.from_numpy(obs)) for obs in parts.obs]).float()]

        return Side(burst, len(parts.obs), len(parts.obs))

    products = compiled(cpp_wrapper=False)(lambda obs: parts.q_network(obs).argmax(1))
    yield pair("greedy action as sums", acting(products), acting(parts.greedy))
