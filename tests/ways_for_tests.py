"""Tiny games that every algorithm learns in a few thousand steps, and games of them that call a service over HTTP."""

import threading

import gymnasium as gym
import numpy as np

from bray.client import Client


class Signs(gym.Env):
    """Four signs, three choices; each sign has one that is right and worth 1, seen at once. Eight signs make an
    episode."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(3)
    length, right = 8, (2, 0, 1, 2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._show(), {}

    def step(self, action):
        reward = float(action == self.right[self.sign])
        self.t += 1
        return self._show(), reward, self.t == self.length, False, {}

    def _show(self):
        self.sign = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.float32)[self.sign]


class Recall(Signs):
    """A sign is shown in the first tick only; until the end of the episode the same choice is right. Who forgets gets
    3.5 at best, and 3 by chance."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    length, right = 6, (0, 1)

    def _show(self):
        if self.t:
            return np.zeros(2, np.float32)
        self.sign = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.sign]


class Follow(gym.Env):
    """A number is shown, and the action should be the same: reward -(action - number)^2. Eight numbers make an
    episode."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._show(), {}

    def step(self, action):
        reward = -float((np.asarray(action).reshape(-1)[0] - self.number) ** 2)
        self.t += 1
        return self._show(), reward, False, self.t == 8, {}

    def _show(self):
        self.number = float(self.np_random.uniform(-1, 1))
        return np.array([self.number], np.float32)


class Games:
    """Games that play over HTTP, each in a thread, until they have made `steps` steps together."""

    def __init__(self, env, port, steps, count=4):
        self.env, self.port, self.steps = env, port, steps
        self.returns, self.made, self.trouble = [], 0, []
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._play, args=(i,), daemon=True) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def close(self):
        self.over.set()
        for thread in self.threads:
            thread.join(60)

    def _play(self, seed):
        try:
            env = self.env()
            with Client("127.0.0.1", self.port) as client:
                client.start()
                obs, _ = env.reset(seed=seed)
                while not self.over.is_set():
                    self._episode(client, env, obs)
                    obs, _ = env.reset()
        except Exception as e:
            if not self.over.is_set():
                self.trouble.append(e)
        if self.trouble:
            self.over.set()

    def _episode(self, client, env, obs):
        total = reward = 0.0
        terminated = truncated = False
        while not self.over.is_set():
            tick = {"obs": obs.tolist(), "reward": reward, "terminated": terminated, "truncated": truncated}
            action = client.tick(tick)["action"]
            if terminated or truncated:
                self.returns.append(total)
                return
            obs, reward, terminated, truncated, _ = env.step(action)
            total += reward
            self.made += 1
            if self.made >= self.steps:
                self.over.set()
