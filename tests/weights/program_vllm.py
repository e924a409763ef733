"""vLLM's engine with a tiny random model, whose weights a trainer in this process publishes."""

import os
import tempfile

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "ASYNCDIST_TOKEN": "a token for tests",
}

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.store import StoreServer
from asyncdist.weights.adapters.vllm_engines import AsyncdistTrainerInitInfo, register_vllm_engines

PROMPT, COUNT = [1, 2, 3, 4], 8


class Client:
    """What tells the workers of an engine in this process to load weights."""

    def __init__(self, llm):
        self.llm = llm
        self.start_weight_update, self.finish_weight_update = llm.start_weight_update, llm.finish_weight_update

    def init_weight_transfer_engine(self, init_info):
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info):
        self.llm.update_weights({"update_info": update_info})


def generated(llm):
    sampling = SamplingParams(temperature=0, max_tokens=COUNT, detokenize=False)
    (answer,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


def expected(model):
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()


def main():
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).to(torch.bfloat16)
    server = background_loop().run(
        StoreServer.start("127.0.0.1", 0, token=os.environ["ASYNCDIST_TOKEN"], config=Config.from_environment())
    )
    register_vllm_engines()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        transfer = WeightTransferConfig(backend="asyncdist")
        llm = LLM(
            model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16",
            enable_prefix_caching=False, weight_transfer_config=transfer,
        )  # fmt: skip
    init_info = AsyncdistTrainerInitInfo(job=f"asyncdist://127.0.0.1:{server.port}/job", rank=0)
    trainer = WeightTransferTrainerFactory.trainer_init(
        init_info=init_info, client=Client(llm), source=ModuleSource(model)
    )
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.05)
        trainer.send_weights()
        print(f"version {step + 1}: {generated(llm) == expected(model)}, {llm.get_weight_version()}", flush=True)
    trainer.shutdown()


if __name__ == "__main__":
    main()
