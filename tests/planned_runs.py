"""Small runs that the tests of `plan` describe, and the tiny pipelines that stand for those of the examples."""

from pathlib import Path

import yaml
from tiny_pipelines import build, of_every_prompt

EXAMPLES = Path(__file__).parents[1] / "examples"
STAND_INS = {  # file of settings: a tiny pipeline of the classes that it trains
    "24gb/flux": "flux",
    "24gb/qwen_image": "qwen_image",
    "24gb/sd35_large": "sd3",
    "24gb/sdxl": "sdxl",
    "24gb/wan21": "wan",
    "24gb/wan22_ti2v": "wan_ti2v",
    "fast/flux": "flux",
    "fast/flux_kontext": "flux_kontext",
    "fast/glm_image": "glm_image",
    "fast/hunyuan_video": "hunyuan_video",
    "fast/qwen_image": "qwen_image",
    "fast/qwen_image_edit": "qwen_image_edit",
    "fast/sd15": "sd15",
    "fast/sd35": "sd3",
    "fast/sdxl": "sdxl",
    "fast/stable_audio": "stable_audio",
    "fast/wan21": "wan",
    "fast/wan22_a14b": "wan_experts",
    "fast/wan22_ti2v_5b": "wan_ti2v",
    "flux": "flux",
    "flux2_klein": "flux2",
    "flux3": "flux3",
    "flux_kontext": "flux_kontext",
    "glm_image_ar": "glm_image",
    "glm_image_dit": "glm_image",
    "glm_image_edit": "glm_image_edit",
    "hunyuan_video": "hunyuan_video",
    "minimax_h3": "minimax_h3",
    "qwen_image": "qwen_image",
    "qwen_image_edit": "qwen_image_edit",
    "sana_sprint": "sana_sprint",
    "sd15": "sd15",
    "sd15_alignprop": "sd15",
    "sd35_geneval": "sd3",
    "sd35_ocr": "sd3",
    "sd35_ocr_fast": "sd3",
    "sdxl": "sdxl",
    "sdxl_inpaint": "sdxl_inpaint",
    "sdxl_turbo": "sdxl",
    "stable_audio": "stable_audio",
    "wan21_gae": "wan",
    "wan21_ocr": "wan",
    "wan22_a14b": "wan_experts",
    "wan22_image_to_video": "wan_image",
    "wan22_ti2v_5b": "wan_ti2v",
    "z_image_turbo": "z_image",
}
PLANNED = {
    "reward_funcs": ["brightness"],
    "use_peft": True,
    "lora_r": 4,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_inference_steps": 4,
    "max_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "gradient_checkpointing": False,
}


def write_run(folder, name, **settings) -> str:
    """Save a tiny pipeline in a folder beside the YAML file of a run on it; return the path of that file."""
    pipe, inputs = build(name)
    pipe.save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("a red cat\na blue dog\na tree\n")
    sizes = {key: inputs.pop(key) for key in ("height", "width", "num_frames", "guidance_scale") if key in inputs}
    inputs.pop("prompt")
    where = {"model": str(folder / "model"), "dataset": str(folder / "prompts.txt"), "output_dir": str(folder / "run")}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(PLANNED | where | sizes | {"pipeline_kwargs": of_every_prompt(inputs)} | settings))
    return str(path)
