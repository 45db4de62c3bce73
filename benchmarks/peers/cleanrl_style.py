"""Eager single-file loops of PPO, recurrent PPO, PQN, DQN, C51 and SAC in the manner of CleanRL, written anew.

CleanRL is a set of scripts rather than a package, so this keeps what decides its speed: a numpy vector environment
stepped one by one, a separate forward pass without gradients per step, advantages in a loop of torch operations, a
minibatch loop with eager Adam, the statistics it logs (Kullback-Leibler estimate, clipped share), and its value clip.
It departs from CleanRL where the case says so: no annealed learning rate, SAC updates the policy at every step, PQN
has Adam, C51 chooses the next action with the online network and projects all rows at once (CleanRL: row by row,
slower).

`--env` (Pong only): gym = gymnasium's SyncVectorEnv, ale = ale_py's AtariVectorEnv, envpool = EnvPool.
"""

import random
from importlib.metadata import version

import cases
import common
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from cases import NUM_ENVS, NUM_STEPS
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from networks import actor_critic, layer_init
from torch import nn
from torch.distributions import Categorical, Normal

PPO_CASES = [*cases.PPO_ENV_IDS, "ppo-pong"]
CASES = [*PPO_CASES, "ppo-dict-lstm", "pqn-cartpole", "dqn-cartpole", "c51-cartpole", "sac-pendulum"]


# ---------------------------------------------------------------------------------------------------- environments


def make_envs(case: str, kind: str):
    """A vector environment that resets finished environments within the same step."""
    if kind == "ale":
        from ale_py.vector_env import AtariVectorEnv

        return AtariVectorEnv("pong", NUM_ENVS, num_threads=2, autoreset_mode=AutoresetMode.SAME_STEP)
    if kind == "envpool":
        return EnvPoolPong()
    return SyncVectorEnv([lambda: cases.make_env(case)] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)


def make_plain(env_id: str, count: int = 1) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gym.make(env_id)] * count, autoreset_mode=AutoresetMode.SAME_STEP)


class EnvPoolPong:
    """EnvPool's Pong with the reset signature of gymnasium. EnvPool resets one step later, as CleanRL accepts."""

    def __init__(self):
        import envpool

        self.envs = envpool.make_gymnasium("Pong-v5", num_envs=NUM_ENVS, num_threads=2, reward_clip=True)
        self.single_observation_space = self.envs.observation_space
        self.single_action_space = self.envs.action_space
        self.step = self.envs.step

    def reset(self, seed=None):
        return self.envs.reset()


class Returns:
    """Sums rewards per environment and notes the sum where an episode ends."""

    def __init__(self, watch: common.Stopwatch, num_envs: int):
        self.sums = np.zeros(num_envs)
        self.finished = watch.returns

    def add(self, reward: np.ndarray, done: np.ndarray) -> None:
        self.sums += reward
        if done.any():
            self.finished.extend(self.sums[done])
            self.sums[done] = 0.0


# ------------------------------------------------------------------------------------------------------------- PPO


def advantages_and_returns(rewards, dones, values, next_done, next_value):
    """GAE, one torch step at a time. All [T, N]; `dones[t]` says that the observation at t began an episode."""
    advantages = torch.zeros_like(rewards)
    last = 0.0
    for t in reversed(range(NUM_STEPS)):
        if t == NUM_STEPS - 1:
            continues, following = 1.0 - next_done, next_value
        else:
            continues, following = 1.0 - dones[t + 1], values[t + 1]
        delta = rewards[t] + cases.GAMMA * following * continues - values[t]
        advantages[t] = last = delta + cases.GAMMA * cases.GAE_LAMBDA * continues * last
    return advantages, advantages + values


def ppo_loss(distribution, value, action, old_logprob, advantage, returned, old_value, clipped_shares):
    """The clipped objective with clipped values, everything [B]."""
    logratio = distribution.log_prob(action) - old_logprob
    ratio = logratio.exp()
    with torch.no_grad():
        _approx_kl = ((ratio - 1) - logratio).mean()
        clipped_shares.append(((ratio - 1.0).abs() > cases.CLIP).float().mean().item())
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = torch.clamp(ratio, 1 - cases.CLIP, 1 + cases.CLIP)
    policy_loss = torch.max(-advantage * ratio, -advantage * clipped_ratio).mean()
    clipped_value = old_value + torch.clamp(value - old_value, -cases.CLIP, cases.CLIP)
    value_loss = 0.5 * torch.max((value - returned) ** 2, (clipped_value - returned) ** 2).mean()
    entropy = distribution.entropy().mean()
    return policy_loss - cases.ENTROPY_COEF * entropy + cases.VALUE_COEF * value_loss


def gradient_step(optimizer, network, loss, max_norm: float = cases.MAX_GRAD_NORM) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), max_norm)
    optimizer.step()


def ppo(case: str, kind: str, watch: common.Stopwatch) -> None:
    envs = make_envs(case, kind)
    network = actor_critic(case, envs.single_observation_space, envs.single_action_space.n)
    optimizer = torch.optim.Adam(network.parameters(), lr=cases.LEARNING_RATE, eps=1e-5)
    returns = Returns(watch, NUM_ENVS)

    obs = torch.zeros((NUM_STEPS, NUM_ENVS, *envs.single_observation_space.shape))
    actions = torch.zeros((NUM_STEPS, NUM_ENVS))
    logprobs, rewards, dones, values = (torch.zeros((NUM_STEPS, NUM_ENVS)) for _ in range(4))
    next_obs = torch.Tensor(envs.reset(seed=common.SEED)[0])
    next_done = torch.zeros(NUM_ENVS)
    env_steps = 0

    while not watch.tick(env_steps):
        for t in range(NUM_STEPS):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                logits, values[t] = network(next_obs)
                distribution = Categorical(logits=logits)
                actions[t] = action = distribution.sample()
                logprobs[t] = distribution.log_prob(action)
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            done = np.logical_or(terminated, truncated)
            rewards[t] = torch.as_tensor(reward)
            next_obs, next_done = torch.Tensor(observation), torch.Tensor(done)
            returns.add(reward, done)
        env_steps += cases.ROLLOUT

        with torch.no_grad():
            advantages, targets = advantages_and_returns(rewards, dones, values, next_done, network.value(next_obs))

        b_obs = obs.reshape(-1, *obs.shape[2:])
        b_actions, b_logprobs, b_advantages, b_targets, b_values = (
            column.reshape(-1) for column in (actions, logprobs, advantages, targets, values)
        )
        clipped_shares = []
        order = np.arange(cases.ROLLOUT)
        for _ in range(cases.EPOCHS):
            np.random.shuffle(order)
            for start in range(0, cases.ROLLOUT, cases.MINIBATCH):
                i = order[start : start + cases.MINIBATCH]
                logits, value = network(b_obs[i])
                loss = ppo_loss(
                    Categorical(logits=logits),
                    value,
                    b_actions[i],
                    b_logprobs[i],
                    b_advantages[i],
                    b_targets[i],
                    b_values[i],
                    clipped_shares,
                )
                gradient_step(optimizer, network, loss)


# --------------------------------------------------------------------------------------------------- recurrent PPO


class RecurrentNetwork(nn.Module):
    """Dict -> Linear 64, tanh -> LSTM 64 -> heads. The LSTM goes step by step and forgets where episodes begin."""

    def __init__(self, observation_space, num_actions: int):
        super().__init__()
        num_inputs = sum(space.shape[0] for space in observation_space.values())
        self.encoder = nn.Sequential(layer_init(nn.Linear(num_inputs, 64)), nn.Tanh())
        self.lstm = nn.LSTM(64, 64)
        self.policy_head = layer_init(nn.Linear(64, num_actions), 0.01)
        self.value_head = layer_init(nn.Linear(64, 1), 1.0)

    def forward(self, obs, done, state):
        """obs {name: [T*N, D]}, done [T*N], state 2 x [1, N, 64] -> logits, values, new state."""
        num_envs = state[0].shape[1]
        hidden = self.encoder(torch.cat(list(obs.values()), dim=-1)).reshape(-1, num_envs, 64)
        outputs = []
        for x, begins in zip(hidden, done.reshape(-1, num_envs), strict=True):
            keep = (1.0 - begins).view(1, -1, 1)
            output, state = self.lstm(x.unsqueeze(0), (keep * state[0], keep * state[1]))
            outputs.append(output)
        hidden = torch.cat(outputs).flatten(0, 1)
        return self.policy_head(hidden), self.value_head(hidden).squeeze(-1), state


def ppo_lstm(case: str, watch: common.Stopwatch) -> None:
    envs = make_envs(case, "gym")
    spaces = envs.single_observation_space
    network = RecurrentNetwork(spaces, envs.single_action_space.n)
    optimizer = torch.optim.Adam(network.parameters(), lr=cases.LEARNING_RATE, eps=1e-5)
    returns = Returns(watch, NUM_ENVS)

    obs = {name: torch.zeros((NUM_STEPS, NUM_ENVS, *space.shape)) for name, space in spaces.items()}
    actions = torch.zeros((NUM_STEPS, NUM_ENVS))
    logprobs, rewards, dones, values = (torch.zeros((NUM_STEPS, NUM_ENVS)) for _ in range(4))
    next_obs = {name: torch.Tensor(array) for name, array in envs.reset(seed=common.SEED)[0].items()}
    next_done = torch.zeros(NUM_ENVS)
    next_state = (torch.zeros(1, NUM_ENVS, 64), torch.zeros(1, NUM_ENVS, 64))
    env_steps = 0

    while not watch.tick(env_steps):
        first_state = (next_state[0].clone(), next_state[1].clone())
        for t in range(NUM_STEPS):
            for name in obs:
                obs[name][t] = next_obs[name]
            dones[t] = next_done
            with torch.no_grad():
                logits, values[t], next_state = network(next_obs, next_done, next_state)
                distribution = Categorical(logits=logits)
                actions[t] = action = distribution.sample()
                logprobs[t] = distribution.log_prob(action)
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            done = np.logical_or(terminated, truncated)
            rewards[t] = torch.as_tensor(reward)
            next_obs = {name: torch.Tensor(array) for name, array in observation.items()}
            next_done = torch.Tensor(done)
            returns.add(reward, done)
        env_steps += cases.ROLLOUT

        with torch.no_grad():
            next_value = network(next_obs, next_done, next_state)[1]
            advantages, targets = advantages_and_returns(rewards, dones, values, next_done, next_value)

        clipped_shares = []
        order = np.arange(NUM_ENVS)
        for _ in range(cases.EPOCHS):
            np.random.shuffle(order)
            for i in np.split(order, cases.MINIBATCHES):  # whole environments: sequences stay in one piece
                minibatch = {name: column[:, i].flatten(0, 1) for name, column in obs.items()}
                state = (first_state[0][:, i], first_state[1][:, i])
                logits, value, _ = network(minibatch, dones[:, i].flatten(), state)
                columns = (actions, logprobs, advantages, targets, values)
                columns = (column[:, i].flatten() for column in columns)
                loss = ppo_loss(Categorical(logits=logits), value, *columns, clipped_shares)
                gradient_step(optimizer, network, loss)


# ------------------------------------------------------------------------------------------------------------- PQN


def dense(num_outputs: int, norm: bool = False) -> nn.Sequential:
    """CartPole's observation through the hidden layers of DQN, with a LayerNorm after each if `norm`."""
    layers, num_inputs = [], 4
    for width in cases.DQN_HIDDEN:
        layers += [nn.Linear(num_inputs, width), *([nn.LayerNorm(width)] if norm else []), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, num_outputs))


def exploration(step: int) -> float:
    return max(1.0 + (cases.DQN_EPSILON - 1.0) * step / cases.DQN_EPSILON_STEPS, cases.DQN_EPSILON)


def lambda_returns(rewards, dones, values, next_done, next_value):
    """Q(lambda), one torch step at a time. All [T, N]; `values` are the largest action values."""
    targets = torch.zeros_like(rewards)
    targets[-1] = rewards[-1] + cases.GAMMA * (1.0 - next_done) * next_value
    for t in reversed(range(NUM_STEPS - 1)):
        following = cases.PQN_LAMBDA * targets[t + 1] + (1.0 - cases.PQN_LAMBDA) * values[t + 1]
        targets[t] = rewards[t] + cases.GAMMA * (1.0 - dones[t + 1]) * following
    return targets


def pqn(watch: common.Stopwatch) -> None:
    envs = make_plain("CartPole-v1", NUM_ENVS)
    num_actions = int(envs.single_action_space.n)
    network = dense(num_actions, norm=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=cases.LEARNING_RATE)
    returns = Returns(watch, NUM_ENVS)

    obs = torch.zeros((NUM_STEPS, NUM_ENVS, 4))
    actions = torch.zeros((NUM_STEPS, NUM_ENVS), dtype=torch.long)
    rewards, dones, values = (torch.zeros((NUM_STEPS, NUM_ENVS)) for _ in range(3))
    next_obs = torch.Tensor(envs.reset(seed=common.SEED)[0])
    next_done = torch.zeros(NUM_ENVS)
    env_steps = 0

    while not watch.tick(env_steps):
        for t in range(NUM_STEPS):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                values[t], greedy = network(next_obs).max(dim=1)
            explores = torch.rand(NUM_ENVS) < exploration(env_steps)
            actions[t] = action = torch.where(explores, torch.randint(num_actions, (NUM_ENVS,)), greedy)
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            done = np.logical_or(terminated, truncated)
            rewards[t] = torch.as_tensor(reward)
            next_obs, next_done = torch.Tensor(observation), torch.Tensor(done)
            returns.add(reward, done)
            env_steps += NUM_ENVS

        with torch.no_grad():
            targets = lambda_returns(rewards, dones, values, next_done, network(next_obs).max(dim=1)[0])
        b_obs, b_actions, b_targets = obs.reshape(-1, 4), actions.reshape(-1, 1), targets.reshape(-1)
        order = np.arange(cases.ROLLOUT)
        for _ in range(cases.EPOCHS):
            np.random.shuffle(order)
            for start in range(0, cases.ROLLOUT, cases.MINIBATCH):
                i = order[start : start + cases.MINIBATCH]
                q = network(b_obs[i]).gather(1, b_actions[i]).squeeze(1)
                gradient_step(optimizer, network, F.mse_loss(q, b_targets[i]), cases.PQN_MAX_GRAD_NORM)


# ----------------------------------------------------------------------------------------------- DQN, C51 and SAC


class ReplayBuffer:
    """A uniform ring of numpy arrays; samples come back as tensors."""

    def __init__(self, capacity: int, observation_shape, action_shape, action_dtype):
        self.obs = np.zeros((capacity, *observation_shape), np.float32)
        self.next_obs = np.zeros((capacity, *observation_shape), np.float32)
        self.actions = np.zeros((capacity, *action_shape), action_dtype)
        self.rewards = np.zeros(capacity, np.float32)
        self.dones = np.zeros(capacity, np.float32)
        self.capacity = capacity
        self.count = 0

    def add(self, obs, next_obs, action, reward, done) -> None:
        i = self.count % self.capacity
        self.obs[i], self.next_obs[i], self.actions[i] = obs, next_obs, action
        self.rewards[i], self.dones[i] = reward, done
        self.count += 1

    def sample(self, batch_size: int):
        i = np.random.randint(0, min(self.count, self.capacity), batch_size)
        columns = (self.obs, self.next_obs, self.actions, self.rewards, self.dones)
        return [torch.as_tensor(column[i]) for column in columns]


def last_observation(observation, info, done):
    """The observation that followed the action: a finished environment has already been reset."""
    return info["final_obs"][0] if done else observation[0]


class Values(nn.Module):
    """obs [B, 4] -> action values [B, A]; the loss of DQN."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.layers = dense(num_actions)

    def forward(self, obs):
        return self.layers(obs)

    def loss(self, target, obs, next_obs, actions, rewards, dones):
        with torch.no_grad():
            best, _ = target(next_obs).max(dim=1)
            td_target = rewards + cases.GAMMA * best * (1 - dones)
        return F.mse_loss(td_target, self(obs).gather(1, actions).squeeze(1))


class Distributions(nn.Module):
    """obs [B, 4] -> means [B, A] of the distributions of returns; the loss of C51."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.layers = dense(num_actions * cases.ATOMS)
        self.atoms = torch.linspace(*cases.RETURNS, cases.ATOMS)

    def logits(self, obs):
        return self.layers(obs).view(len(obs), -1, cases.ATOMS)

    def forward(self, obs):
        return (self.logits(obs).softmax(dim=2) * self.atoms).sum(2)

    def loss(self, target, obs, next_obs, actions, rewards, dones):
        rows, (low, high) = torch.arange(len(obs)), cases.RETURNS
        with torch.no_grad():
            probs = target.logits(next_obs)[rows, self(next_obs).argmax(1)].softmax(dim=1)
            atoms = rewards.unsqueeze(1) + cases.GAMMA * self.atoms * (1 - dones).unsqueeze(1)
            place = (atoms.clamp(low, high) - low) * ((cases.ATOMS - 1) / (high - low))
            below = place.floor().clamp(max=cases.ATOMS - 2)
            goal = torch.zeros_like(probs)
            goal.scatter_add_(1, below.long(), (below + 1 - place) * probs)
            goal.scatter_add_(1, below.long() + 1, (place - below) * probs)
        probs = self.logits(obs)[rows, actions.squeeze(1)].softmax(dim=1)
        return -(goal * probs.clamp(min=1e-5, max=1 - 1e-5).log()).sum(1).mean()


def dqn(kind: type[nn.Module], watch: common.Stopwatch) -> None:
    envs = make_plain("CartPole-v1")
    num_actions = int(envs.single_action_space.n)
    returns = Returns(watch, 1)
    network, target = kind(num_actions), kind(num_actions)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=cases.DQN_LEARNING_RATE)
    replay = ReplayBuffer(cases.DQN_BUFFER, (4,), (1,), np.int64)
    obs, _ = envs.reset(seed=common.SEED)
    step = 0

    while not watch.tick(step):
        if random.random() < exploration(step):
            action = np.array([envs.single_action_space.sample()])
        else:
            with torch.no_grad():
                action = network(torch.Tensor(obs)).argmax(dim=1).numpy()
        next_obs, reward, terminated, truncated, info = envs.step(action)
        done = np.logical_or(terminated, truncated)
        returns.add(reward, done)
        replay.add(obs[0], last_observation(next_obs, info, done[0]), action, reward[0], terminated[0])
        obs = next_obs
        step += 1

        if step > cases.DQN_LEARNING_STARTS and step % cases.DQN_TRAIN_EVERY == 0:
            loss = network.loss(target, *replay.sample(cases.DQN_BATCH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % cases.DQN_TARGET_EVERY == 0:
            follow(target, network, 1.0)


def follow(target: nn.Module, source: nn.Module, tau: float) -> None:
    """target <- tau * source + (1 - tau) * target, parameter by parameter."""
    for theirs, ours in zip(target.parameters(), source.parameters(), strict=True):
        theirs.data.copy_(tau * ours.data + (1.0 - tau) * theirs.data)


class SoftQ(nn.Module):
    def __init__(self, num_inputs: int):
        super().__init__()
        first, second = cases.SAC_HIDDEN
        self.layers = nn.Sequential(
            nn.Linear(num_inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 1)
        )

    def forward(self, obs, action):
        return self.layers(torch.cat([obs, action], 1)).squeeze(1)


class SquashedGaussian(nn.Module):
    """obs [B, D] -> action [B, A] and its log probability [B]."""

    def __init__(self, num_inputs: int, space: gym.spaces.Box):
        super().__init__()
        first, second = cases.SAC_HIDDEN
        self.trunk = nn.Sequential(nn.Linear(num_inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU())
        self.mean = nn.Linear(second, space.shape[0])
        self.log_std = nn.Linear(second, space.shape[0])
        self.scale = torch.as_tensor((space.high - space.low) / 2)
        self.middle = torch.as_tensor((space.high + space.low) / 2)

    def forward(self, obs):
        features = self.trunk(obs)
        log_std = -5 + 0.5 * 7 * (torch.tanh(self.log_std(features)) + 1)  # within [-5, 2]
        normal = Normal(self.mean(features), log_std.exp())
        x = normal.rsample()
        y = torch.tanh(x)
        logprob = normal.log_prob(x) - torch.log(self.scale * (1 - y.pow(2)) + 1e-6)
        return y * self.scale + self.middle, logprob.sum(1)


def sac(watch: common.Stopwatch) -> None:
    envs = make_plain("Pendulum-v1")
    space = envs.single_action_space
    returns = Returns(watch, 1)
    actor = SquashedGaussian(3, space)
    q1, q2, q1_target, q2_target = (SoftQ(4) for _ in range(4))
    q1_target.load_state_dict(q1.state_dict())
    q2_target.load_state_dict(q2.state_dict())
    q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=cases.SAC_LEARNING_RATE)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=cases.SAC_LEARNING_RATE)
    target_entropy = -float(space.shape[0])
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha = log_alpha.exp().item()
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=cases.SAC_LEARNING_RATE)
    replay = ReplayBuffer(cases.SAC_BUFFER, (3,), (1,), np.float32)
    obs, _ = envs.reset(seed=common.SEED)
    step = 0

    while not watch.tick(step):
        if step < cases.SAC_LEARNING_STARTS:
            action = space.sample()[None]
        else:
            with torch.no_grad():
                action = actor(torch.Tensor(obs))[0].numpy()
        next_obs, reward, terminated, truncated, info = envs.step(action)
        done = np.logical_or(terminated, truncated)
        returns.add(reward, done)
        replay.add(obs[0], last_observation(next_obs, info, done[0]), action[0], reward[0], terminated[0])
        obs = next_obs
        step += 1
        if step <= cases.SAC_LEARNING_STARTS:
            continue

        b_obs, b_next_obs, b_actions, b_rewards, b_dones = replay.sample(cases.SAC_BATCH)
        with torch.no_grad():
            next_action, next_logprob = actor(b_next_obs)
            next_q = torch.min(q1_target(b_next_obs, next_action), q2_target(b_next_obs, next_action))
            td_target = b_rewards + (1 - b_dones) * cases.GAMMA * (next_q - alpha * next_logprob)
        q_loss = F.mse_loss(q1(b_obs, b_actions), td_target) + F.mse_loss(q2(b_obs, b_actions), td_target)
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        action, logprob = actor(b_obs)
        actor_loss = (alpha * logprob - torch.min(q1(b_obs, action), q2(b_obs, action))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        with torch.no_grad():
            _, logprob = actor(b_obs)
        alpha_loss = (-log_alpha.exp() * (logprob + target_entropy)).mean()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        alpha_optimizer.step()
        alpha = log_alpha.exp().item()

        follow(q1_target, q1, cases.SAC_TAU)
        follow(q2_target, q2, cases.SAC_TAU)


def main() -> None:
    parser = common.parser(__doc__, CASES)
    parser.add_argument(
        "--env", choices=["gym", "ale", "envpool"], default="gym", help="vector environment of ppo-pong"
    )
    args = parser.parse_args()
    if args.env != "gym" and args.case != "ppo-pong":
        parser.error(f"--env {args.env} goes with ppo-pong only, not with {args.case}")
    cases.prepare(args.case)
    random.seed(common.SEED)
    name = "cleanrl-style"
    if args.case in ("dqn-cartpole", "c51-cartpole"):
        kind = Values if args.case == "dqn-cartpole" else Distributions
        dqn(kind, watch := common.Stopwatch(args.seconds, cases.DQN_EPSILON_STEPS))
    elif args.case == "pqn-cartpole":
        pqn(watch := common.Stopwatch(args.seconds, cases.DQN_EPSILON_STEPS))
    elif args.case == "sac-pendulum":
        sac(watch := common.Stopwatch(args.seconds, cases.SAC_LEARNING_STARTS))
    elif args.case == "ppo-dict-lstm":
        ppo_lstm(args.case, watch := common.Stopwatch(args.seconds, cases.ROLLOUT))
    else:
        ppo(args.case, args.env, watch := common.Stopwatch(args.seconds, cases.ROLLOUT))
        name += f" ({args.env})" if args.case == "ppo-pong" else ""
    common.report(name, f"torch {version('torch')}", args.case, watch)


if __name__ == "__main__":
    main()
