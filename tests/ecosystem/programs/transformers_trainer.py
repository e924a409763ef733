"""Transformers' `Trainer`: a tiny GPT-2 from a configuration, evaluation with gathered predictions, a checkpoint."""

import os

import torch
from regression import end_together, report
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import asyncdist.torch_backend

VOCABULARY, LENGTH = 17, 8


class Sequences(Dataset):
    """Counts upwards from a random number."""

    def __init__(self, count: int) -> None:
        first = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(count))
        self.tokens = (first + torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


torch.distributed.init_process_group("asyncdist")  # TrainingArguments uses this group; leave ddp_backend out
set_seed(0)
config = GPT2Config(
    vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
)  # fmt: skip
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir=os.environ["ECOSYSTEM_RESULTS"],
    use_cpu=True,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=1e-2,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
)


def accuracy(prediction):
    """Return the share of tokens that were predicted."""
    guesses = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((guesses == prediction.label_ids[:, 1:]).mean())}


trainer = Trainer(model, arguments, train_dataset=Sequences(32), eval_dataset=Sequences(13), compute_metrics=accuracy)
trainer.train()
evaluation = trainer.evaluate()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
report(
    losses=losses, loss=evaluation["eval_loss"], accuracy=evaluation["eval_accuracy"], steps=trainer.state.global_step,
    predictions=len(trainer.predict(Sequences(13)).predictions), weights=model.transformer.wte.weight.detach(),
)  # fmt: skip
end_together()
