"""transformers' `LlamaForCausalLM` under its own `Trainer`, which pauses between steps until the bench asks for more."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from bench import llama, protocol


class Rows(Dataset):  # type: ignore[type-arg]
    """Row i of step i // batch; labels are given already shifted, as the other peers take them."""

    def __init__(self, shape: llama.Shape) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 100_000 * self.shape.batch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, labels = llama.batch(self.shape, index // self.shape.batch)
        row = index % self.shape.batch
        return {"input_ids": tokens[row], "labels": labels[row], "shift_labels": labels[row]}


class Ordered(Trainer):
    """The Trainer, reading its rows in order and keeping each step's loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_loss = torch.zeros(())

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.step_loss = super().training_step(*args, **kwargs)
        return self.step_loss


class Paced(TrainerCallback):
    """Runs as many steps as were asked for, then answers and waits; the wait is not counted."""

    def __init__(self, channel: protocol.Channel) -> None:
        self.channel, self.left = channel, 0
        self.seconds: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.trainer: Ordered | None = None
        self.begin = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        now = time.perf_counter()
        self.seconds.append(now - self.begin)
        self.losses.append(self.trainer.step_loss.detach())
        self.begin, self.left = now, self.left - 1
        if self.left == 0:
            self.channel.say(seconds=self.seconds, losses=[float(loss) for loss in self.losses], rss=protocol.peak_mb())
            self._wait(control)

    def _wait(self, control: Any) -> None:
        command = self.channel.hear()
        if command is None:
            control.should_training_stop = True
            return
        self.left, self.seconds, self.losses = command["steps"], [], []
        self.begin = time.perf_counter()


def main() -> None:
    args = protocol.parse()
    channel = protocol.open_channel(args.threads)
    shape = llama.SHAPES[args.size]
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.sequence,
        rms_norm_eps=llama.NORM_EPS,
        rope_theta=llama.ROPE_THETA,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(llama.weights(shape))
    if args.precision == "bfloat16":
        model.bfloat16()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=shape.batch,
            max_steps=100_000,
            learning_rate=llama.LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=llama.WEIGHT_DECAY,
            adam_beta1=llama.BETAS[0],
            adam_beta2=llama.BETAS[1],
            max_grad_norm=llama.CLIP,
            optim="adamw_torch_fused",
            use_cpu=True,
            bf16=args.precision == "autocast",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            torch_compile=args.compile,
            disable_tqdm=True,
        )
        paced = Paced(channel)
        trainer = Ordered(model=model, args=arguments, train_dataset=Rows(shape), callbacks=[paced])
        paced.trainer = trainer
        parameters = sum(parameter.numel() for parameter in model.parameters())
        channel.say(
            rss_import=channel.rss_import,
            torch=torch.__version__,
            tokens_per_step=shape.tokens_per_step,
            parameters=parameters,
            version=f"transformers {transformers.__version__}",
        )
        trainer.train()
    channel.end()


if __name__ == "__main__":
    main()
