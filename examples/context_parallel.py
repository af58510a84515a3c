"""One text over several processes: a loss with gradients, then generation. No GPU and no download is needed:

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import isentrope as ise


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    parallel = ise.ContextParallel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ise.extend(model, "rerope:window=64+infoscale:keys=near+share:beta=0.5", parallel=parallel)

    ids = torch.randint(1, 256, (1, 1000))  # the same in every process
    result = model(**parallel.shard(input_ids=ids, labels=ids))
    result.loss.backward()
    parallel.sum_gradients(model)
    print(f"process {parallel.rank}: {result.logits.shape[1]} tokens, loss of all {parallel.sum(result.loss):.6f}")

    logits, cache = parallel.prefill(model, ids)  # the cache stays in parts, and all processes generate together
    print(f"process {parallel.rank}: {cache.layers[0].keys.shape[2]} of {cache.get_seq_length()} keys")
    ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
    torch.manual_seed(1)  # the same in every process, where tokens are sampled
    generated = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=True)[0, 1000:].tolist()
    print(f"process {parallel.rank} generated: {generated}, and has {cache.layers[0].keys.shape[2]} keys")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
