"""Supervised training on a task's demonstrations or on rows, before reinforcement learning starts.

The first ``clean_fraction`` of the updates use only correct demonstrations, which teach the skill. The rest use the
task's mixture, and the model then applies the skill rarely. The loss is the mean over the response's tokens with its
end token; prompts are not learned. Muon trains the matrices of the blocks, and AdamW everything else (embeddings,
norms, biases), both with one schedule: linear warm-up, then a cosine to 5 %.

Each thread computes the gradients of its own microbatches on one core. For small models this is twice as fast as two
threads for each operation, which would wait for each other thousands of times a second (decision 0044).

Invariant: the same model, task, settings and seed give the same result to the bit, with any number of threads. The only
randomness is in the demonstrations or the order of the rows, and comes from one generator. Gradients are added in a
fixed order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from asyncrl_cli.core.errors import UserError
from asyncrl_cli.data.chat_template import ChatTemplate
from asyncrl_cli.data.images import ImageTokens
from asyncrl_cli.data.special_tokens import plain_ids
from asyncrl_cli.data.tokenizer import load_tokenizer, templates_texts, without_progress_bars
from asyncrl_cli.records.prompt import ChatError, Message, Prompt
from asyncrl_cli.rollout.response_text import end_tokens
from asyncrl_cli.spec.inputs import WarmStart
from asyncrl_cli.spec.sections import ExperimentSpec
from asyncrl_cli.tasks.base import DemonstrationTask, Task
from asyncrl_cli.train import schedule
from asyncrl_cli.train.conversations import Example, RowEncoder, Rows, encode_rows, until_end
from asyncrl_cli.train.model.image_models import model_class
from asyncrl_cli.train.model.images import Vision, freeze, states
from asyncrl_cli.train.model.saving import save_model
from asyncrl_cli.train.model.sequence_parallel import ROPE_BY_LENGTH

FINAL_FRACTION = 0.05
"""Where the cosine ends, as a fraction of the peak learning rate."""

MICROBATCH = 6
"""Demonstrations in one forward and backward pass."""

IGNORED = -100
"""Label of a token that is not learned."""

Progress = Callable[[int, int, float, int], None]
"""Called after every update with the updates so far, all updates, the loss in nats per token, and the number of rows
skipped because they are too long."""


def warm_start(
    model_dir_in: Path,
    source: Task | Rows,
    spec: WarmStart,
    max_length: int,
    seed: int,
    directory_out: Path,
    progress: Progress | None = None,
    run: ExperimentSpec | None = None,
) -> None:
    """Train the model in ``model_dir_in`` on CPU in float32 and write it, with its tokenizer, to ``directory_out``.

    ``source``: a task with demonstrations, or the rows of ``spec.data``; ``max_length``: the longest one, in tokens.
    ``run``: the whole spec, for the chat template and images; by default there is no image, and the tokenizer has its
    own template. Sets the process's number of threads while it runs.

    Raises ``UserError`` if the task has no demonstrations, one is too long, or the loss is not finite, and
    ``DataError`` like ``encode_rows``.
    """
    if not isinstance(source, Rows | DemonstrationTask):
        raise UserError(
            "the task has no demonstrations",
            location="model.warm_start",
            hint="give the task a method demonstration(rng, clean), name rows in model.warm_start.data, or remove "
            "model.warm_start",
        )
    tokenizer = load_tokenizer(model_dir_in, run.model.chat_template if run else None)
    ends = end_tokens(model_dir_in, tokenizer)
    template = ChatTemplate.from_spec(run, tokenizer) if run else ChatTemplate(tokenizer)
    texts_are_chats = (run is None or run.data.apply_chat_template) and templates_texts(tokenizer)
    seeing = run if run and run.model.max_images else None
    with without_progress_bars():
        model = model_class(seeing is not None).from_pretrained(model_dir_in, dtype=torch.float32)
    vision: Vision | None = None
    image_tokens = ImageTokens("", 0, 0)
    if seeing is not None:
        freeze(model, seeing.model)
        vision = Vision(model, str(model_dir_in), bidirectional=seeing.rollout.gpus_per_engine > 0)
        image_tokens = ImageTokens(str(model_dir_in), seeing.model.max_images, seeing.data.image_max_pixels)
    encoder = RowEncoder(
        tokenizer,
        template=template,
        texts_are_chats=texts_are_chats,
        ends=ends,
        spec=spec,
        images=image_tokens,
    )
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rng = random.Random(f"warm_start/{seed}")

    skipped = 0
    batches: Iterator[list[Example]]  # drawn one by one, each before its update
    if isinstance(source, Rows):
        encoded, skipped = encode_rows(source, encoder, max_length)
        drawn = chain.from_iterable(rng.sample(encoded, len(encoded)) for _ in count())  # shuffled again and again
        batches = (list(islice(drawn, spec.batch_size)) for _ in range(spec.steps))
    else:
        clean_updates = round(spec.steps * spec.clean_fraction)
        batches = (
            demonstrated(
                [source.demonstration(rng, update < clean_updates) for _ in range(spec.batch_size)], encoder, max_length
            )
            for update in range(spec.steps)
        )

    def shown(done: int, total: int, loss: float) -> None:
        if progress is not None:
            progress(done, total, loss, skipped)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(_threads(model, spec), "warm start") as pool:
            _train(model, batches=batches, pad_id=pad_id, spec=spec, pool=pool, progress=shown, vision=vision)
    finally:
        torch.set_num_threads(threads)
    save_model(model, model_dir_in, directory_out)
    tokenizer.save_pretrained(directory_out)


def collate(examples: list[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels, int64, both (examples, longest - 1). A position's label is the next token.

    Padding is on the right, where a causal model's real tokens cannot see it, so there is no attention mask.
    """
    width = max(len(ids) for ids, *_ in examples) - 1
    inputs = torch.full((len(examples), width), pad_id)
    labels = torch.full((len(examples), width), IGNORED)
    for row, example in enumerate(examples):
        ids, learned = example[:2]
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        following = torch.tensor(ids[1:])
        labels[row, : len(ids) - 1] = following.where(torch.tensor(learned[1:]), IGNORED)
    return inputs, labels


def demonstrated(
    demonstrations: Sequence[tuple[str, str] | Sequence[Message] | Prompt], encoder: RowEncoder, max_length: int
) -> list[Example]:
    """Encode a task's demonstrations. Raises ``UserError`` for one that cannot be encoded or is too long."""
    chat = _Chat(encoder.tokenizer, encoder.texts_are_chats, encoder.template)
    found: list[Example] = []
    for one in demonstrations:  # first those with images, which are prompts; the others are tokenized in one call
        if isinstance(one, Prompt):
            try:
                found.append(_short_enough(encoder.encode(one), one.uid, max_length))
            except ChatError as error:
                raise UserError(
                    f"the demonstration {one.uid!r} cannot be encoded: {error}",
                    location="model.warm_start",
                    hint="correct the task's method `demonstration`",
                ) from error
    others = [one for one in demonstrations if not isinstance(one, Prompt)]
    return found + _tokenized(others, chat=chat, max_length=max_length, ends=encoder.ends)


def _tokenized(
    demonstrations: Sequence[tuple[str, str] | Sequence[Message]],
    chat: _Chat,
    max_length: int,
    ends: frozenset[int],
) -> list[Example]:
    if not demonstrations:
        return []
    tokenizer = chat.tokenizer
    prompts, responses, templated = zip(*map(chat.texts, demonstrations), strict=True)
    encode = chat.template.encode
    encoded = {
        by_template: iter(encode(texts) if by_template else plain_ids(tokenizer, texts))
        for by_template in set(templated)
        if (texts := [prompt for prompt, other in zip(prompts, templated, strict=True) if other is by_template])
    }
    prompt_ids = [next(encoded[by_template]) for by_template in templated]
    response_ids = encode(responses)
    examples = []
    for text, prompt, response in zip(prompts, prompt_ids, response_ids, strict=True):
        ids = [*prompt, *(until_end(response, ends) or [*response, tokenizer.eos_token_id])]
        example = Example(ids, [False] * len(prompt) + [True] * (len(ids) - len(prompt)))
        examples.append(_short_enough(example, text, max_length))
    return examples


def _short_enough(example: Example, name: str, max_length: int) -> Example:
    if len(example.ids) > max_length:
        raise UserError(
            f"the demonstration for {name!r} has {len(example.ids)} tokens, more than model.max_length {max_length}",
            hint="raise model.max_length, or shorten demonstrations with task.options",
        )
    return example


@dataclass(frozen=True, slots=True)
class _Chat:
    """Renders demonstrations as text, like the prompts of the run."""

    tokenizer: Any
    texts_are_chats: bool
    template: ChatTemplate

    def texts(self, demonstration: tuple[str, str] | Sequence[Message]) -> tuple[str, str, bool]:
        """Return prompt, response, and whether the chat template wrote them."""
        if isinstance(demonstration, tuple):
            if not self.texts_are_chats:
                return *demonstration, False
            roles = ("user", "assistant")
            demonstration = [{"role": r, "content": text} for r, text in zip(roles, demonstration, strict=True)]
        prompt = self.template.text(demonstration[:-1], reply=True)
        conversation = self.template.text(demonstration)
        if not conversation.startswith(prompt):
            raise UserError(
                "the chat template renders the messages before a reply differently once the reply is there",
                hint="use a template that only appends, or give demonstrations as text with data.apply_chat_template: "
                "false",
            )
        return prompt, conversation[len(prompt) :], True


def _threads(model: Any, spec: WarmStart) -> int:
    """Number of threads that may use the model at the same time. Only one if its rotary embeddings are in
    ``ROPE_BY_LENGTH``: these keep the longest sequence's frequencies, so threads would change each other's results."""
    types = str([getattr(module, "rope_type", None) for module in model.modules()])
    return 1 if any(name in types for name in ROPE_BY_LENGTH) else spec.threads


def _train(
    model: Any,
    batches: Iterator[list[Example]],
    pad_id: int,
    spec: WarmStart,
    pool: Executor,
    progress: Callable[[int, int, float], None],
    vision: Vision | None,
) -> None:
    optimizers = _optimizers(model, spec, pool)
    model.eval()  # no dropout: threads would share its random numbers
    for update, examples in enumerate(batches):
        factor = schedule.factor(
            update, spec.steps, warmup=spec.warmup_steps, kind="cosine", final_fraction=FINAL_FRACTION
        )
        loss = _accumulate_gradients(model, examples=examples, pad_id=pad_id, pool=pool, vision=vision)
        if not math.isfinite(loss):
            raise UserError(
                f"the warm start's loss is {loss} at update {update + 1}", hint="lower the warm start's learning rates"
            )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * group["peak"]
            optimizer.step()
            optimizer.zero_grad()
        progress(update + 1, spec.steps, loss)


def _accumulate_gradients(
    model: Any, examples: list[Example], pad_id: int, pool: Executor, vision: Vision | None = None
) -> float:
    """Set the gradients of the mean loss over all response tokens of ``examples``, and return this loss."""
    tokens = sum(sum(example[1]) for example in examples)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def passes(rows: list[Example]) -> tuple[float, tuple[torch.Tensor | None, ...]]:
        inputs, labels = collate(rows, pad_id)
        if vision is not None and any(row.images for row in rows):
            images = vision.inputs([row.images for row in rows], inputs.shape[1])
            hidden = states(model.base_model, ids=inputs, positions=None, images=images)
            logits = model.get_output_embeddings()(hidden)
        else:
            logits = model(input_ids=inputs, use_cache=False).logits
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = summed / tokens
        # Not ``backward``, which would add to the gradients in the order in which threads end.
        return loss.item(), torch.autograd.grad(loss, trained, allow_unused=True)

    # Rows of similar length go together: more than half of a plain batch would be padding. The longest rows come first,
    # or one thread would still compute them when the others are done.
    by_length = sorted(examples, key=lambda example: -len(example[0]))
    total = 0.0
    # Added in the order of the micro-batches, whichever thread ends first: another order gives other bits.
    for loss, gradients in pool.map(
        passes, (by_length[i : i + MICROBATCH] for i in range(0, len(by_length), MICROBATCH))
    ):
        total += loss
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return total


def _optimizers(model: Any, spec: WarmStart, pool: Executor) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of linear layers except the output layer; AdamW for all other parameters."""
    outer = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    linear = {id(layer.weight) for layer in model.modules() if isinstance(layer, torch.nn.Linear)} - outer
    matrices = [parameter for parameter in model.parameters() if id(parameter) in linear]
    others = [parameter for parameter in model.parameters() if id(parameter) not in linear]
    muon = Muon(matrices, lr=spec.matrix_learning_rate, momentum=0.95, weight_decay=spec.weight_decay, pool=pool)
    adamw = torch.optim.AdamW(others, lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [muon, adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan, 2024: https://kellerjordan.github.io/posts/muon/)."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Set all singular values of ``matrices`` to about 1, by the Newton-Schulz iteration with ``COEFFICIENTS``.

    Argument and result: float32, [count, rows, columns].
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum with decoupled weight decay.

    A matrix with more rows than columns takes a larger step, by the root of their ratio, as in Jordan's code.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        pool: Executor,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._pool = pool

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            # One call for all matrices of a shape: for a small model a call costs more than its arithmetic.
            list(self._pool.map(partial(self._update, group), by_shape.values()))
        return None

    @torch.no_grad()
    def _update(self, group: dict[str, Any], matrices: list[torch.nn.Parameter]) -> None:
        """Update matrices of one shape."""
        directions = []
        for matrix in matrices:
            assert matrix.grad is not None
            state = self.state[matrix]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(matrix)
            average = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
            directions.append(matrix.grad.lerp(average, group["momentum"]))
        rows, columns = matrices[0].shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        for matrix, update in zip(matrices, orthogonalized(torch.stack(directions)), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(update, alpha=-rate)
