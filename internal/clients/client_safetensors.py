"""safetensors, and transformers with many shards, Trainer with rotation and resume."""

import pathlib

import rig

torch, safetensors, transformers = rig.need("torch", "safetensors.torch", "transformers")

tensors = {f"w{i}": torch.randn(300, 400) for i in range(10)}
safetensors.save_file(tensors, rig.A / "one.safetensors")
got = safetensors.load_file(rig.B / "one.safetensors")
assert all(torch.equal(got[k], v) for k, v in tensors.items())

config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                                  num_key_value_heads=4, vocab_size=512, max_position_embeddings=64)
model = transformers.LlamaForCausalLM(config)
model.save_pretrained(rig.A / "hf", max_shard_size="100KB")
shards = list((rig.B / "hf").glob("*.safetensors"))
assert len(shards) > 5, shards
again = transformers.LlamaForCausalLM.from_pretrained(rig.B / "hf")
for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
    assert torch.equal(a, b), name


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randint(0, 512, (16,), generator=g)
        return {"input_ids": x, "labels": x}


def train(where, steps, resume=None):
    args = transformers.TrainingArguments(str(where), max_steps=steps, save_steps=2, save_total_limit=2, report_to=[],
                                          per_device_train_batch_size=4, logging_steps=100, use_cpu=True,
                                          disable_tqdm=True)
    t = transformers.Trainer(model=transformers.LlamaForCausalLM(config), args=args, train_dataset=Data())
    t.train(resume_from_checkpoint=resume)
    return t


rig.need("accelerate")
train(rig.A / "out", 6)
kept = sorted(p.name for p in (rig.B / "out").glob("checkpoint-*"))
assert kept == ["checkpoint-4", "checkpoint-6"], kept
train(rig.B / "out", 8, resume=str(rig.B / "out" / "checkpoint-6"))
assert (pathlib.Path(rig.A) / "out" / "checkpoint-8" / "trainer_state.json").stat().st_size > 0
rig.same_trees()
