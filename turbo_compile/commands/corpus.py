"""Text in rows of tokens: documents read from a file, tokenized, joined and cut, or each in rows of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from turbo_compile.batch import IGNORE
from turbo_compile.errors import TurboCompileError

END = "<|endoftext|>"
BYTES = 256


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows of tokens, (N, S). Positions restart and the label is ignored where a document begins.

    `mask` is 1 at tokens and 0 at padding; None: there is no padding.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    mask: Tensor | None = None

    def batch(self, step: int, rows: int, seed: int) -> dict[str, Tensor]:
        """The global batch of a step: every row once in an order drawn for each pass over the text."""
        total = len(self.ids)
        if rows > total:
            raise TurboCompileError(
                f"the text makes {total} rows of {self.ids.shape[1]} tokens, fewer than a batch of {rows}; "
                "give more text, or a smaller --batch or --seq"
            )
        steps = total // rows
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed + step // steps))
        chosen = order[step % steps * rows :][:rows]
        batch = {
            "input_ids": self.ids[chosen],
            "position_ids": self.positions[chosen],
            "labels": self.labels[chosen],
        }
        return batch if self.mask is None else {**batch, "attention_mask": self.mask[chosen]}


def read_documents(file: Path) -> list[str]:
    """The documents of a file: one a line in JSONL (`{"text": ...}`), else the whole.

    Raises:
        TurboCompileError: no such file, or a line without text.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TurboCompileError(f"cannot read {file}: {reason}") from None
    if file.suffix not in (".jsonl", ".json"):
        return [text]
    return list(_lines(file, text))


def pack(documents: list[str], tokenizer: Any, vocabulary: int, seq: int) -> Corpus:
    """All documents side by side, in rows of `seq`: no padding, and the short last row is dropped."""
    parts = _tokenized(documents, tokenizer)
    ids = torch.tensor([token for part in parts for token in part])
    begins = torch.zeros(len(ids), dtype=torch.bool)
    begins[torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)[:-1]] = True
    rows = len(ids) // seq
    if not rows:
        raise TurboCompileError(
            f"the text has {len(ids)} tokens, fewer than one row of {seq}; give more, or a smaller --seq"
        )
    _check_vocabulary(ids, vocabulary)
    ids, begins = (each[: rows * seq].view(rows, seq) for each in (ids, begins))
    return Corpus(ids, _positions(begins), ids.masked_fill(begins, IGNORE))


def pad(documents: list[str], tokenizer: Any, vocabulary: int, seq: int) -> Corpus:
    """Each document in rows of its own, cut to `seq` or padded to it on the right, where positions go on."""
    parts = _tokenized(documents, tokenizer)
    pieces = [(part[first : first + seq], not first) for part in parts for first in range(0, len(part), seq)]
    pieces = [(piece, begins) for piece, begins in pieces if len(piece) > 1]  # one token alone predicts nothing
    if not pieces:
        raise TurboCompileError("the text has no document of two tokens; give more")
    filler = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    ids = torch.tensor([piece + [filler] * (seq - len(piece)) for piece, _ in pieces])
    _check_vocabulary(ids, vocabulary)
    index = torch.arange(seq).expand(ids.shape)
    mask = (index < torch.tensor([[len(piece)] for piece, _ in pieces])).long()
    ignored = mask == 0
    ignored[:, 0] = torch.tensor([begins for _, begins in pieces])
    return Corpus(ids, index, ids.masked_fill(ignored, IGNORE), mask)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte a token, its value the id, and one more token that ends a text."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def _byte_symbols() -> list[str]:
    """The visible character that byte-level tokenizers write for each byte: itself, or one from 256 up."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in shown else next(others)) for byte in range(BYTES)]


def _lines(file: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise TurboCompileError(f"{file}:{number}: not JSON ({error})") from None
        if not isinstance(found, dict) or not isinstance(found.get("text"), str):
            raise TurboCompileError(f'{file}:{number}: a line must be an object with a "text", like {{"text": "..."}}')
        yield found["text"]


def _tokenized(documents: list[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each document that has any, closed by the end-of-text token."""
    end = tokenizer.eos_token_id
    parts = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in documents]
    return [[*part, end] if end is not None else part for part in parts if part]


def _check_vocabulary(ids: Tensor, vocabulary: int) -> None:
    if int(ids.max()) >= vocabulary:
        raise TurboCompileError(
            f"the tokenizer makes token {int(ids.max())}, but the model's vocabulary ends at {vocabulary - 1}"
        )


def _positions(begins: Tensor) -> Tensor:
    """For each token, how far it is into its document, or into its row if that began later."""
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    return index - torch.where(begins, index, 0).cummax(dim=1).values
