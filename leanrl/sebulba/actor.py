"""An actor thread: its environments, its copy of the policy, and the rollouts that it plays."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn as nn

from leanrl.sebulba.layout import Piece
from leanrl.sebulba.mailbox import Mailbox, Stopped
from leanrl.sebulba.params import ParamsSource, version_for
from leanrl.sebulba.randomness import gumbel_noise
from leanrl.sebulba.rollout import Header, Rollout
from leanrl.support.atari import whole_games
from leanrl.support.devices import synchronize_stream
from leanrl.support.envs import EnvPoolVectorEnv
from leanrl.support.episodes import EpisodeStatistics
from leanrl.support.executables import URGENT, WARMUP_CALLS, make_executable
from leanrl.support.optim import FlatParameters


def make_act(agent: nn.Module, amp: str, device: torch.device) -> tuple[Callable, Callable]:
    """The functions that act.

    Returns:
        ``act(obs, noise)``: [n, ...], Gumbel noise [n, num_actions] -> [3, n] actions, log-probabilities, values. One
        float32 tensor, so that one copy brings it to the CPU; an action's number is exact in it;
        ``refresh()``: to be called when the parameters of ``agent`` have changed.
    """
    rounded = {}
    if amp == "bf16":
        # Large matrices are rounded once per rollout, which autocast would do at every step, to the same numbers.
        rounded = {
            f"{name}.weight": module.weight.detach().bfloat16()
            for name, module in agent.named_modules()
            if name.startswith("torso.") and isinstance(module, nn.Linear)
        }

    def refresh() -> None:
        for name, copy in rounded.items():
            copy.copy_(agent.get_parameter(name))

    def act(obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp == "bf16"):
            logits, values = torch.func.functional_call(agent, rounded, (obs,))
        logits = logits.float()
        actions = (logits + noise).argmax(1)
        logprobs = logits.log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
        return torch.stack([actions.float(), logprobs, values.float()])

    return act, refresh


class ActorThread(threading.Thread):
    """Plays rollouts first_version + 1 to last, each with the parameters that the schedule names.

    Everything that compiles or captures happens in ``warm_up``, on the thread that makes it.

    Args:
        name: what errors call it.
        pieces: what it plays, in the order of its environments.
        envs: those environments.
        agent: network of its own, whose parameters it overwrites.
        source: of the parameters.
        args: the script's.
        device: where ``agent`` and the rollouts are.
        first_version: updates taken before the run (resumed) began.
        last: number of the last rollout.
        fail: called with an error that ended the thread, and its name.
    """

    def __init__(
        self,
        name: str,
        pieces: Sequence[Piece],
        envs: EnvPoolVectorEnv,
        agent: nn.Module,
        source: ParamsSource,
        args,
        device: torch.device,
        first_version: int,
        last: int,
        fail: Callable[[BaseException, str], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.pieces = pieces
        self._envs = envs
        self._source = source
        self._args = args
        self._device = device
        self._first_version, self._last = first_version, last
        self._fail = fail
        self._params = FlatParameters(agent).params
        num_envs, self._num_actions = envs.num_envs, int(envs.single_action_space.n)
        first_env = pieces[0].envs.start
        self._columns = [slice(p.envs.start - first_env, p.envs.stop - first_env) for p in pieces]
        # The same row comes out with other last bits from a batch of another size, so exactness wants blocks of a size
        # that is the same in every layout.
        size = len(pieces[0].envs) if args.exact_reduction else num_envs
        self._blocks = [slice(start, start + size) for start in range(0, num_envs, size)]
        act, self._refresh = make_act(agent, args.amp, device)
        self._act = make_executable(act, device, args.compile, args.cudagraphs, cpp_wrapper=False, urgent=True)
        space = envs.single_observation_space
        dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
        pinned = device.type == "cuda"
        self._host_obs = torch.zeros((num_envs, *space.shape), dtype=dtype, pin_memory=pinned)
        self._obs = self._host_obs.to(device) if pinned else self._host_obs
        self._choices = torch.zeros(args.num_steps, 3, num_envs, device=device)
        self._stopped = False
        self._episodes = EpisodeStatistics(num_envs)
        self._free: Mailbox[list[Rollout]] = Mailbox(args.timeout)
        self._played: Mailbox[list[Rollout]] = Mailbox(args.timeout)
        # The schedule lets a thread play so many rollouts before the learner takes the first of them, which it copies
        # and gives back ahead of its update: with a lag, a thread goes on while others still play.
        for _ in range(args.policy_lag + 1):
            self._free.put([Rollout.allocate(args.num_steps, len(p.envs), space.shape, dtype, device) for p in pieces])

    def warm_up(self) -> None:
        """Compiles and captures; nothing that counts is changed."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # what is compiled will always start as many as there are now
        obs = self._obs[self._blocks[0]]
        noise = torch.zeros(len(obs), self._num_actions, device=self._device)
        for _ in range(WARMUP_CALLS if self._args.compile or self._args.cudagraphs else 1):
            self._act(obs, noise)
        torch.set_num_threads(num_threads)

    def take(self, waiter: str) -> list[Rollout]:
        """The next rollout, one piece for each of ``pieces``; ``waiter`` is who waits. Give it back when done.

        Raises:
            Stopped: the thread has failed or was stopped.
            Stalled: none came in time.
        """
        return self._played.get(f"{self.name}, a rollout, by {waiter}")

    def give_back(self, rollout: list[Rollout]) -> None:
        """Lets the thread overwrite what ``take`` returned."""
        self._free.put(rollout)

    def stop(self) -> None:
        """Makes the thread end at its next step or wait; whoever waits for it is let go."""
        self._stopped = True
        self._free.close()
        self._played.close()

    @torch.no_grad()
    def run(self) -> None:
        # A second thread of PyTorch's here would wait for work by spinning, and the library that starts them lets all
        # of the process's go to sleep sooner once there are more than cores. A thread takes the process's number when
        # it first needs one, so that comes first.
        torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            if self._device.type == "cuda":
                with torch.cuda.stream(torch.cuda.Stream(self._device, priority=URGENT)):
                    self._play()
            else:
                self._play()
        except Stopped:
            pass
        except BaseException as error:  # nobody else would hear of it
            self._played.close()
            self._fail(error, self.name)
        finally:
            self._envs.close()

    def _play(self) -> None:
        obs, _ = self._envs.reset()
        resets = np.zeros(self._envs.num_envs, bool)
        for number in range(self._first_version + 1, self._last + 1):
            waiting = time.time()
            rollout = self._free.get(f"a free buffer for rollout {number}, by {self.name}")
            started = time.time()
            version = version_for(number, self._args.policy_lag, self._first_version)
            self._source.fetch(version, self._params)
            self._refresh()
            fetched = time.time()
            header = Header(
                number, version, started=started, params_wait=fetched - started, queue_put=started - waiting
            )
            obs, resets = self.play_rollout(rollout, header, obs, resets)
            self._played.put(rollout)

    def play_rollout(
        self, rollout: list[Rollout], header: Header, obs: np.ndarray, resets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Plays one rollout with the parameters that are there.

        Args:
            rollout: one for each of ``pieces``, to be filled.
            header: what is known already; ``rollout.header`` gets it with the times.
            obs, resets: [n, ...] what the environments returned last, and whether their next step only resets them.

        Returns:
            obs and resets for the next one.
        """
        num_steps, num_envs = self._args.num_steps, self._envs.num_envs
        envs = range(self.pieces[0].envs.start, self.pieces[-1].envs.stop)
        first_step = int(header.rollout) * num_steps
        steps = range(first_step, first_step + num_steps)
        noise = gumbel_noise(self._args.seed, envs, steps, self._num_actions, self._device)
        shape = (num_steps, num_envs)
        rewards, (returns, lengths) = np.zeros(shape, np.float32), np.full((2, *shape), np.nan, np.float32)
        terminations, dones, all_resets = np.zeros((3, *shape), bool)
        inference = env_step = device_to_host = 0.0
        for step in range(num_steps + 1):
            begin = time.perf_counter()
            self._write_obs(rollout, step, obs)
            if step == num_steps:
                break
            if self._stopped:
                raise Stopped
            choices = self._choices[step]
            for block in self._blocks:
                choices[:, block] = self._act(self._obs[block], noise[step, block])
            launched = time.perf_counter()
            actions = choices[0].cpu().numpy()
            copied = time.perf_counter()
            obs, rewards[step], terminations[step], truncations, infos = self._envs.step(actions)
            stepped = time.perf_counter()
            inference += launched - begin
            device_to_host += copied - launched
            env_step += stepped - copied

            dones[step] = terminations[step] | truncations
            all_resets[step] = resets
            raw_rewards, ends = whole_games(rewards[step], dones[step], infos)
            returns[step, ends], lengths[step, ends] = self._episodes.add_step(raw_rewards, ends, resets)
            resets = dones[step].copy()

        outcome = {"rewards": rewards, "terminations": terminations, "dones": dones, "resets": all_resets}
        outcome |= {"returns": returns, "lengths": lengths}
        header = header._replace(
            ended=time.time(), inference=inference, env_step=env_step, device_to_host=device_to_host
        )
        for piece, columns in zip(rollout, self._columns, strict=True):
            piece.actions.copy_(self._choices[:, 0, columns])
            piece.logprobs.copy_(self._choices[:, 1, columns])
            piece.values.copy_(self._choices[:, 2, columns])
            for name, array in outcome.items():
                getattr(piece, name).copy_(torch.from_numpy(array[:, columns]))
            piece.header.copy_(torch.tensor(header, dtype=torch.float64))
        synchronize_stream(self._device)  # the main thread reads it on another
        return obs, resets

    def _write_obs(self, rollout: list[Rollout], step: int, obs: np.ndarray) -> None:
        self._host_obs.copy_(torch.from_numpy(obs))
        if self._obs is not self._host_obs:
            self._obs.copy_(self._host_obs, non_blocking=True)
        for piece, columns in zip(rollout, self._columns, strict=True):
            piece.obs[step].copy_(self._obs[columns])
