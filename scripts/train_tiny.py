"""Train the embedded model `src/nanovllm/assets/tiny-qwen3`: a Qwen3 of 4.5 M parameters.

    apt-get install bible-kjv r-cran-janeaustenr sword-comm-mhcc libsword-utils dict-devil
    python scripts/train_tiny.py corpus --out corpus
    python scripts/train_tiny.py train --corpus corpus --out src/nanovllm/assets/tiny-qwen3
    python scripts/measure_tiny.py src/nanovllm/assets/tiny-qwen3 --corpus corpus

Figures: see the README.md of the model.
"""

import json
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
COPYING_LEARNT = 3.5  # nats on periodic noise: 2.2 for a perfect copier, 8.3 at first
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


def draw_periodic(vocab_size: int, batch: int, rng: torch.Generator) -> torch.Tensor:
    """Noise that repeats with a period of 32-512 tokens, [batch, CONTEXT + 1].

    Nothing but copying from far back predicts it: attention learns that first, before
    the text; from text alone a model of this size did not learn it.
    """
    noise = torch.randint(3, vocab_size, (batch, CONTEXT + 1), generator=rng)
    period = torch.randint(32, CONTEXT // 2 + 1, (batch, 1), generator=rng)
    return noise.gather(1, torch.arange(CONTEXT + 1).expand(batch, -1) % period)


def draw_windows(
    stream: torch.Tensor, batch: int, recall: float, rng: torch.Generator
) -> torch.Tensor:
    """Windows of `stream`, [batch, CONTEXT + 1]; in a share `recall` a passage comes a second time.

    The passage (32-320 tokens) recurs at least its own length later, so that predicting it needs
    attention far back while no short loop is taught.
    """

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (batch, 1), generator=rng)

    position = torch.arange(CONTEXT + 1).expand(batch, -1)
    length = draw(32, 321)
    second = length + draw(0, CONTEXT - 384)
    distance = length + (torch.rand((batch, 1), generator=rng) * (second - length)).long()
    copied = (position >= second) & (position < second + length)
    copied &= torch.rand((batch, 1), generator=rng) < recall
    source = torch.where(copied, position - distance, position)
    return stream[source + draw(0, len(stream) - CONTEXT)]


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
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits = model(ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


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
    """Up to 64 windows per source, and `twice`: windows whose second half repeats the first."""
    windows = {}
    for source, documents in held.items():
        stream = token_stream(tokenizer, ["\n".join(d) for d in documents], seed=0)
        windows[source] = stream.unfold(0, CONTEXT + 1, CONTEXT + 1)[:64]
    halves = torch.cat([w[:16, : CONTEXT // 2] for w in windows.values()])
    return windows | {"twice": torch.cat([halves, halves, halves[:, :1]], 1)}


def build_optimizer(model: torch.nn.Module, peak: float) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=DEVICE == "cuda")


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 50 steps, then linear decay to 2 % of the peak."""
    return peak * min((step + 1) / 50, max(0.02, 1 - step / steps))


def fit(
    model: torch.nn.Module,
    stream: torch.Tensor,
    held: dict[str, torch.Tensor],
    *,
    copying: int,
    steps: int,
    batch: int,
    peak: float,
    seed: int,
) -> list[dict[str, object]]:
    """At most `copying` steps on noise, until copying is learnt, then text; returns a log."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = build_optimizer(model, peak)
    compiled = torch.compile(model) if DEVICE == "cuda" else model
    log, start = [], time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        if step < copying:
            ids = draw_periodic(model.config.vocab_size, batch, rng)
        else:
            ids = draw_windows(stream, batch, 1.0 if step < steps // 3 else 0.25, rng)
        loss = next_token_loss(compiled, ids.to(DEVICE))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step < copying and step % 20 == 19 and loss.item() < COPYING_LEARNT:
            copying = step + 1
        if step % 200 == 199 or step in (copying - 1, steps - 1):
            losses = {name: held_out_loss(model, windows) for name, windows in held.items()}
            seconds = round(time.perf_counter() - start)
            log.append({"step": step + 1, "s": seconds, "train": round(loss.item(), 3), **losses})
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
    steps: int = 3000,
    copying: Annotated[int, typer.Option(help="most steps on periodic noise, before text")] = 800,
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
        copying=copying,
        steps=steps,
        batch=batch,
        peak=peak,
        seed=seed,
    )
    save(model, tokenizer, out)
    lines = "\n".join(json.dumps(line) for line in log)
    (out / "training_log.jsonl").write_text(lines + "\n")


if __name__ == "__main__":
    app()
