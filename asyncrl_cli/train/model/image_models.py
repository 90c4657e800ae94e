"""Vision-language models: their class, their image tokens, and the processor that makes patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.data.tokenizer import GEMMA, VISION_TOKENS


def model_class(images: bool) -> Any:
    """Return the transformers class that loads or builds a language model, or one that also sees images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def set_image_tokens(config: Any, tokenizer: Any) -> None:
    """Write the ids of the image tokens into a vision-language config. Raises ``ConfigError`` if one is missing."""
    for name, token in VISION_TOKENS[config.model_type].names.items():
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"the tokenizer has no token {token}, which a {config.model_type} needs for images",
                location="model.init.tokenizer",
                hint="name the tokenizer of such a model, or use `characters`",
            )
        setattr(config, f"{name}_id", tokenizer.convert_tokens_to_ids(token))


def save_processor(config: Any, tokenizer: Any, directory: Path) -> None:
    """Write the files of a vision-language model's processor, with the patch sizes in its config."""
    _processor(config, tokenizer).save_pretrained(directory)


def name_tower(weights: Path) -> None:
    """Rename the vision tower's tensors in a saved new Gemma 3 as on the hub, because vLLM requires these names.
    transformers saves a loaded model under its old names, but a new model under other names."""
    from safetensors.torch import load_file, save_file

    saved = load_file(weights)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): saved[name] for name in saved}
    save_file(renamed, weights, metadata={"format": "pt"})


def _processor(config: Any, tokenizer: Any) -> Any:
    vision = config.vision_config
    if config.model_type == GEMMA:
        from transformers.models.gemma3 import Gemma3Processor
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        side = vision.image_size
        return Gemma3Processor(
            Gemma3ImageProcessorPil(size={"height": side, "width": side}),
            tokenizer,
            chat_template=tokenizer.chat_template,
            image_seq_length=config.mm_tokens_per_image,
        )
    from transformers.models.auto.processing_auto import processor_class_from_name
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    patches = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    side = vision.patch_size * vision.spatial_merge_size  # pixels on a token's side
    name = "Qwen3VLProcessor" if config.model_type == "qwen3_vl" else "Qwen2_5_VLProcessor"
    return processor_class_from_name(name)(
        image_processor=Qwen2VLImageProcessorPil(min_pixels=side**2, **patches),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**patches),  # the class requires one
        chat_template=tokenizer.chat_template,
    )
