"""Train the embedded model `src/nanovllm/assets/tiny-qwen3`: a Qwen3 of 4.5 M parameters.

    apt-get install bible-kjv r-cran-janeaustenr sword-comm-mhcc libsword-utils dict-devil
    python scripts/train_tiny.py corpus --out corpus
    python scripts/train_tiny.py train --corpus corpus --out src/nanovllm/assets/tiny-qwen3
    python scripts/measure_tiny.py src/nanovllm/assets/tiny-qwen3 --corpus corpus

The weights in the project are this script's, with its defaults: 1,500 steps in 133 s on one H200;
loss in nats per token 2.79 in training, held out 3.01 (Bible), 3.76 (Austen), 3.47 (Henry), 4.14
(Devil's Dictionary). More figures are in the model's README.md.
"""

import json
import math
import random
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from tiny_corpus import TURN, TURN_END, WEIGHTS, Document, chats, read_corpus, write_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

END = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTEXT = 1024
ROPE_THETA = 1e6
BLOCK = 16  # tokens: what a wrong entry of a block table replaces
REACH = 320  # tokens within which predictions must depend on every earlier block
DEPENDENCE = 0.05  # nats by which they must change when a block does
DEPENDENCE_WEIGHT = 4.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def corpus(out: Annotated[Path, typer.Option(help="folder to write")]) -> None:
    """Extract the texts from the installed Debian packages."""
    write_corpus(out)


# --- tokens


def train_tokenizer(
    documents: dict[str, list[Document]], vocab_size: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE; ids 0, 1, 2 are the special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, TURN, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = (p + "\n" for of_source in documents.values() for d in of_source for p in d)
    bpe.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END,
        additional_special_tokens=[TURN],
        model_max_length=2 * CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> torch.Tensor:
    """All texts, shuffled, each followed by the end-of-text token: one long row of ids."""
    shuffled = random.Random(seed).sample(texts, len(texts))
    rows = tokenizer.backend_tokenizer.encode_batch([text + END for text in shuffled])
    return torch.tensor([token for row in rows for token in row.ids])


def draw_windows(stream: torch.Tensor, batch: int, rng: torch.Generator) -> torch.Tensor:
    """Random windows of `stream`, [batch, CONTEXT + 1]."""
    starts = torch.randint(0, len(stream) - CONTEXT, (batch, 1), generator=rng)
    return stream[starts + torch.arange(CONTEXT + 1)]


# --- training


def build_config(vocab_size: int) -> Qwen3Config:
    """8 heads of 32 on a hidden size of 224, two query heads per key head, tied embeddings."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=224,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2 * CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="sdpa",
    )


def add_dropout(model: torch.nn.Module, share: float) -> None:
    """Drop from what each block adds to the residual stream; active in `train()` mode only."""
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(lambda m, _, out: F.dropout(out, share, m.training))


def next_token_loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per token, ids [B, T + 1]."""
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        logits = model(ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def plain_and_lack(
    model: torch.nn.Module, ids: torch.Tensor, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token loss without dropout, and how far predictions fail to depend on a block.

    A block of each row of ids [B, T + 1] gets its neighbour's tokens; then every 32 later
    predictions must change by a mean KL divergence of DEPENDENCE nats. Without this, English of 200
    tokens is mostly continued from its latest blocks alone, and a wrong entry far back in a block
    table would not show. One prediction counts for at most 4.

    Dropout is off, since it changes predictions too; the plain loss belongs to that: without it,
    the model learns English for runs with dropout and dependence for those without.
    """
    ids, targets = ids[:, :REACH], ids[:, 1 : REACH + 1]
    block = torch.randint(0, REACH // BLOCK - 2, (len(ids), 1), generator=rng).to(DEVICE)
    position = torch.arange(REACH, device=DEVICE)
    spoiled = torch.where(position // BLOCK == block, ids.roll(1, dims=0), ids)
    model.eval()
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
        logits = model(torch.cat([ids, spoiled]), use_cache=False).logits
    model.train()
    right, wrong = logits.float().log_softmax(-1).chunk(2)
    change = F.kl_div(wrong, right, reduction="none", log_target=True).sum(-1)
    change = change.clamp(max=4 * DEPENDENCE).unflatten(1, (-1, 32)).mean(-1)
    later = position[::32] >= (block + 1) * BLOCK
    lack = (DEPENDENCE - change).relu()[later].mean()
    return F.nll_loss(right.flatten(0, 1), targets.flatten()), lack


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """Mean loss over windows [N, T + 1]."""
    model.eval()
    losses = [next_token_loss(model, w.to(DEVICE)).item() for w in windows.split(16)]
    model.train()
    return round(sum(losses) / len(losses), 3)


def held_out_windows(
    tokenizer: PreTrainedTokenizerFast, held: dict[str, list[Document]]
) -> dict[str, torch.Tensor]:
    """Up to 64 windows per source, each [N, CONTEXT + 1]."""
    windows = {}
    for source, documents in held.items():
        stream = token_stream(tokenizer, ["\n".join(d) for d in documents], seed=0)
        windows[source] = stream.unfold(0, CONTEXT + 1, CONTEXT + 1)[:64]
    return windows


def build_optimizer(model: torch.nn.Module, peak: float) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=DEVICE == "cuda")


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up over 50 steps, then linear decay to 2 % of the peak; progress is in [0, 1)."""
    return peak * min((step + 1) / 50, max(0.02, 1 - progress))


def fit(
    model: torch.nn.Module,
    stream: torch.Tensor,
    held: dict[str, torch.Tensor],
    *,
    steps: int,
    seconds: float,
    batch: int,
    peak: float,
    seed: int,
) -> list[dict[str, object]]:
    """Train for `steps`, or until `seconds` have passed; returns the log of losses."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = build_optimizer(model, peak)
    compiled = torch.compile(model, dynamic=False) if DEVICE == "cuda" else model
    log, start, step, progress = [], time.perf_counter(), 0, 0.0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, peak)
        ids = draw_windows(stream, batch, rng).to(DEVICE)
        loss = next_token_loss(compiled, ids)
        plain, lack = plain_and_lack(compiled, ids[: batch // 2], rng)
        (loss + plain + DEPENDENCE_WEIGHT * lack).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, took = step + 1, time.perf_counter() - start
        progress = max(step / steps, took / seconds)
        if step % 200 == 0 or progress >= 1:
            losses = {name: held_out_loss(model, windows) for name, windows in held.items()}
            train = {"train": round(plain.item(), 3), "lack": round(lack.item(), 4)}
            log.append({"step": step, "s": round(took), **train, **losses})
            typer.echo(json.dumps(log[-1]))
    return log


def save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write bf16 weights, and settings that transformers 4 and 5 both read."""
    model.to("cpu", torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    edits = {
        "config.json": {"torch_dtype": "bfloat16", "rope_theta": ROPE_THETA, "rope_scaling": None},
        "generation_config.json": {"eos_token_id": [2, 0], "pad_token_id": 0},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, fields in edits.items():
        content = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps(content | fields, indent=2) + "\n")
    (out / "model.safetensors").chmod(0o644)


@app.command()
def train(
    corpus: Annotated[Path, typer.Option(help="folder that `corpus` wrote")],
    out: Annotated[Path, typer.Option(help="folder of the model")],
    steps: int = 1500,
    seconds: Annotated[float, typer.Option(help="end earlier, after this time")] = math.inf,
    batch: Annotated[int, typer.Option(help="sequences of 1024 tokens a step")] = 64,
    peak: Annotated[float, typer.Option(help="peak learning rate")] = 3e-3,
    dropout: Annotated[float, typer.Option(help="share of the residual branches dropped")] = 0.1,
    seed: int = 0,
) -> None:
    """Train tokenizer and model."""
    torch.manual_seed(seed)
    documents, held = read_corpus(corpus)
    tokenizer = train_tokenizer(documents, vocab_size=4096)
    texts = list(chats(documents, share=0.3, rng=random.Random(seed)))
    texts += ["\n".join(d) for name, ds in documents.items() for d in ds * WEIGHTS[name]]
    stream = token_stream(tokenizer, texts, seed)
    model = AutoModelForCausalLM.from_config(build_config(len(tokenizer))).to(DEVICE).train()
    add_dropout(model, dropout)
    typer.echo(f"{model.num_parameters():,} parameters, {len(stream):,} tokens")
    log = fit(
        model,
        stream,
        held_out_windows(tokenizer, held),
        steps=steps,
        seconds=seconds,
        batch=batch,
        peak=peak,
        seed=seed,
    )
    save(model, tokenizer, out)
    lines = "\n".join(json.dumps(line) for line in log)
    (out / "training_log.jsonl").write_text(lines + "\n")


if __name__ == "__main__":
    app()
