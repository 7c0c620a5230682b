"""A LoRA on a quantised base under several processes: it trains what one process trains, or is refused."""

import pytest
import quantized
from rank_runs import trained
from tiny_runs import difference
from torch import nn

from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.distributed.fsdp import FSDP2Backend
from diffusion_grpo.training import preflight

SETTINGS = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "num_generations": 4}
SETTINGS |= {"num_inference_steps": 3, "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.1}
SETTINGS |= {"reward_weights": [0.0, 1.0]}


@pytest.mark.distributed
def test_two_processes_train_what_one_trains_on_int8_weights(tmp_path):
    base = str(quantized.save_pipeline(tmp_path / "base"))
    settings = SETTINGS | {"model": base, "quantization": {"transformer": "torchao"}}
    plain, alone, weights = trained(tmp_path / "one", 1, settings, "smooth")
    wrapper, both, together = trained(tmp_path / "two", 2, settings, "smooth")
    assert (plain, wrapper) == ("PeftModel", "DistributedDataParallel")
    assert [entry["ratio/max_error"] for entry in (*alone, *both)] == [0.0] * 4
    assert difference(weights, together) < 1e-6
    assert max(value.abs().max() for name, value in weights.items() if "lora_B" in name) > 1e-4  # from 0


def test_ddp_sends_no_frozen_weights():
    network = nn.Linear(2, 2)
    network.register_parameter("bytes", nn.Parameter(network.weight.data.byte(), requires_grad=False))
    DistributedBackend(None, ContextGroups()).bind(None, network, [])
    assert network._ddp_params_and_buffers_to_ignore == ["bytes"]


def test_it_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    base = quantized.save_pipeline(tmp_path / "base")
    monkeypatch.setattr(preflight, "choose_backend", lambda args: FSDP2Backend.__new__(FSDP2Backend))
    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", None)
    with pytest.raises(ValueError, match="FSDP2 cannot shard torchao's weights; set load_in_4bit"):
        quantized.trainer_of(base, tmp_path / "run", quantization={"transformer": "torchao"})


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["zero2", "zero3", "fsdp2"])
def test_four_bits_are_sharded_and_train_what_one_process_trains(tmp_path, mode):
    pytest.importorskip("bitsandbytes")
    base = str(quantized.save_pipeline(tmp_path / "base"))
    settings = SETTINGS | {"model": base, "quantization": {"transformer": "bitsandbytes_4bit"}}
    by = {"rewards": "smooth", "by": quantized.train_on_bitsandbytes}
    _, _, weights = trained(tmp_path / "one", 1, settings, **by)
    _, _, together = trained(tmp_path / "two", 2, settings | {"mode": mode}, **by)
    assert difference(weights, together) < 1e-6
