"""A checkpoint that sees: the shipped model as the language model of an Idefics3.

Its vision weights are random. Chats without an image are answered as by the shipped model. Of
vLLM's architectures over a Llama it is one that loads without torchvision.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
)

from demo.stack import MODEL

IMAGE = "<image>"
#: A picture is cut into up to 2 x 2 tiles of so many pixels, each of 2 x 2 patches.
TILE, PATCH = 28, 14
MARKS = ["<fake_token_around_image>", IMAGE, "<end_of_utterance>", "<global-img>"]
MARKS += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
#: What a picture adds to a prompt: for each tile and the whole two marks and its token, a line
#: break after each row and before the whole, a mark at the end. A wide one has one row of tiles.
SQUARE_TOKENS, WIDE_TOKENS = 5 * 3 + 3 + 1, 3 * 3 + 2 + 1
#: What the shipped template does with a list of parts, and what is needed: images leave a token.
JOINED = "{% set text = message['content'] | map(attribute='text') | join('') %}"
PARTS = f"""{{%- set parts = namespace(text='') %}}
{{%- for part in message['content'] %}}
{{%- set parts.text = parts.text + (part['text'] if part['type'] == 'text' else '{IMAGE}') %}}
{{%- endfor %}}{{% set text = parts.text %}}"""


def make_vision_model(folder: Path, seed: int = 1) -> Path:
    """Write the checkpoint: the shipped model's weights, the vision tower's from a seed."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    known = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    text = LlamaConfig.from_pretrained(MODEL)
    text.vocab_size = len(tokenizer)
    config = Idefics3Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": TILE, "patch_size": PATCH,
        },
        text_config=text, tie_word_embeddings=True, scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    weights = {
        name.removeprefix("model."): tensor.float()
        for name, tensor in load_file(MODEL / "model.safetensors").items()
    }
    table = weights["embed_tokens.weight"]
    # A mark's logit is the mean of all others: never above the greatest.
    marks = table.mean(0).expand(len(tokenizer) - known, -1)
    weights["embed_tokens.weight"] = torch.cat([table, marks])
    model.model.text_model.load_state_dict(weights)
    # As strong as the words of the language model
    torch.nn.init.normal_(model.model.connector.modality_projection.proj.weight)
    model.save_pretrained(folder)
    template = (MODEL / "chat_template.jinja").read_text()
    if JOINED not in template:
        raise ValueError(f"the shipped chat template has changed; it lacks {JOINED}")
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}
    )
    Idefics3Processor(
        images, tokenizer, image_seq_len=1, chat_template=template.replace(JOINED, PARTS)
    ).save_pretrained(folder)
    shutil.copy(MODEL / "generation_config.json", folder)
    return folder
