"""Frozen parts and rewards leave the accelerator while the network works, and a replay keeps what a step keeps."""

import dataclasses

import embedding_runs
import pytest
import tiny_pipelines
import torch
from tiny_runs import are_equal, brightness, finished_run, logged, trained_weights, trainer_for

from diffusion_grpo.algorithms.grpo import GRPO
from diffusion_grpo.policy.rollout import DenoisingPolicy, replay, rollout
from diffusion_grpo.rewards.models.base import ModelReward
from diffusion_grpo.training import offload
from diffusion_grpo.training.lazy_modules import find_lazy_modules
from diffusion_grpo.training.offload import FrozenOffload

SEEDS = [1, 2]


def recorded_moves(monkeypatch, parts):
    """(name, device) of every `.to` of some modules; "cpu:0" stands for an accelerator, "cpu" for CPU memory."""
    moves = []
    for name, part in parts.items():

        def to(device, name=name, part=part):
            moves.append((name, str(device)))
            return part

        monkeypatch.setattr(part, "to", to, raising=False)
    return moves


def test_parts_come_when_called_and_leave_for_the_network(monkeypatch):
    pipe, inputs = tiny_pipelines.build("flux_kontext")
    frozen = {name: getattr(pipe, name) for name in ("text_encoder", "text_encoder_2", "vae")}
    moves = recorded_moves(monkeypatch, frozen)
    policy = DenoisingPolicy(pipe)
    held = FrozenOffload(pipe, policy.networks, "cpu:0")
    assert sorted(moves) == sorted((name, "cpu") for name in frozen)
    moves.clear()

    seen = []
    pipe.transformer.register_forward_pre_hook(lambda *_: seen.append(list(held.present)))
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    away = [(name, "cpu") for name in ("text_encoder", "text_encoder_2", "vae")]
    came = [move for move in moves if move[1] == "cpu:0"]
    assert sorted(came[:3]) == sorted((name, "cpu:0") for name in frozen)  # prompts and the image to be edited
    assert sorted(moves[3:6]) == sorted(away)
    assert moves[6:] == [("vae", "cpu:0")]  # the samples are decoded
    assert len(seen) == 4 and not any(seen)

    moves.clear()
    with torch.enable_grad():
        replay(policy, inputs, trajectory, 1)
    # the prompts' embeddings are at hand; the image is encoded again, by a VAE that is still there
    assert moves == [("vae", "cpu")]
    moves.clear()
    replay(policy, inputs, trajectory, 2)
    assert moves == [("vae", "cpu:0"), ("vae", "cpu")]


def test_an_encoder_that_comes_back_leaves_for_the_network_too(tmp_path):
    """With `cache_prompt_embeds`: a prompt that was not encoded ahead, then one that evaluations encode."""
    policy, inputs = embedding_runs.case("sd3", tmp_path)
    embeds = embedding_runs.embeds(policy, inputs)
    embeds.prepare(embedding_runs.ALONE, [], ["a cat"])
    held, seen = FrozenOffload(policy.pipe, policy.networks, "cpu:0"), []
    policy.network.register_forward_pre_hook(lambda *_: seen.append(list(held.present)))

    def draw(text):
        given = inputs([{"prompt": text}])
        rollout(policy, given, seeds=[0], steps=[[0]], num_inference_steps=4, is_complete=False)
        return [part.is_loaded for part in find_lazy_modules(policy.pipe).values()]

    assert draw("a cat") == [False] * 3
    assert draw("a dog") == [True] * 3
    for text in ("a cow", "a hen"):  # they have come back once already
        embeds.prepare(embedding_runs.ALONE, [], [text])
        assert draw(text) == [False] * 3
    assert draw("a pig") == [True] * 3
    assert seen and not any(seen)


def test_what_works_at_every_step_stays(monkeypatch):
    pipe, inputs = tiny_pipelines.build("sd15_controlnet")
    moves = recorded_moves(monkeypatch, {"controlnet": pipe.controlnet})
    held = FrozenOffload(pipe, [pipe.unet], "cpu:0")
    rollout(pipe, inputs, seeds=SEEDS, num_inference_steps=3)
    assert moves == [("controlnet", "cpu:0")] and set(held.hooks) == {"text_encoder", "vae"}


def test_training_is_the_same_to_the_last_bit(tmp_path, monkeypatch):
    settings = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    plain = finished_run(tmp_path / "plain", **settings)

    calls, present, real = [], [], offload.OnDemandHook.pre_forward

    def came(hook, *args, **kwargs):
        calls.append(hook)
        return real(hook, *args, **kwargs)

    monkeypatch.setattr(offload.OnDemandHook, "pre_forward", came)
    step = GRPO.loss

    def watched(algorithm, *args):
        calls.clear()
        result = step(algorithm, *args)
        present.append((list(spared.learner.offload.present), len(calls)))
        return result

    monkeypatch.setattr(GRPO, "loss", watched)
    spared = trainer_for(tmp_path / "spared", offload_frozen="cpu", **settings)
    spared.train()
    assert spared.learner.offload.hooks and present and all(state == ([], 0) for state in present)
    assert are_equal(trained_weights(spared), trained_weights(plain))
    assert logged(spared, "eval_reward") == logged(plain, "eval_reward")
    assert logged(spared, "reward") == logged(plain, "reward")


@dataclasses.dataclass(eq=False)
class Shade(ModelReward):
    """A reward with a network that notes where it is; "cpu:0" stands for an accelerator."""

    model: str = "none"
    device: str | None = "cpu:0"

    def __post_init__(self):
        super().__post_init__()
        self.__name__ = self.model  # which names the reward

    def sources(self):
        return []

    def load(self):
        network, self.places = torch.nn.Linear(1, 1), ["cpu"]
        network.to = lambda device: self.places.append(str(device)) or network
        return network

    def __call__(self, images):
        return self.in_batches(lambda network, own: self.note(own), images)

    def note(self, images):
        assert self.places[-1] == "cpu:0"
        return brightness(images)


@pytest.mark.parametrize("offload_rewards", [None, "cpu"])
def test_rewards_are_off_the_accelerator_while_the_network_works(tmp_path, offload_rewards):
    """Those that are trained on and those that are only measured, in rollouts, updates and evaluations."""
    trained, measured = Shade(), Shade(model="measured")
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_reward_funcs": measured}
    trainer = trainer_for(tmp_path, rewards=trained, offload_rewards=offload_rewards, **settings)
    seen = {trained: set(), measured: set()}

    def note(*_):
        for reward, places in seen.items():
            places.update(getattr(reward, "places", [])[-1:])

    trainer.policy.network.register_forward_pre_hook(note)
    trainer.train()
    assert seen == {reward: {"cpu" if offload_rewards else "cpu:0"} for reward in seen}
    calls = (2, 2) if offload_rewards else (4, 2)  # of rollouts, by groups or in one go, and of evaluations
    assert trained.places.count("cpu:0") == sum(calls) and measured.places.count("cpu:0") == 2


def saved_bytes(run, parameters):
    """Bytes that a computation with gradient keeps for its backward pass, each storage once, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage  # alive, so that no other is given its place
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    assert kept.requires_grad
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_a_replay_keeps_what_an_ordinary_training_step_keeps(name):
    pipe, inputs = tiny_pipelines.build(name)
    policy = DenoisingPolicy(pipe)
    network = policy.network
    calls = []
    handle = network.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=6)
    handle.remove()
    own = calls[:2] if len(calls) == 12 else calls[:1]  # guidance by two passes a step, or by one of twice the batch

    def ordinary():
        outputs = [network(*args, **kwargs) for args, kwargs in own]
        return sum((getattr(x, "sample", x[0]) ** 2).mean() for x in outputs)

    latent = trajectory.latents[:, 0].nbytes
    expected = saved_bytes(ordinary, network.parameters())
    for step in (0, 2, 4):
        found = saved_bytes(lambda step=step: replay(policy, inputs, trajectory, step).log_prob, network.parameters())
        assert found <= expected + 2 * latent, (step, found, expected, latent)
