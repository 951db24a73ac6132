"""DeepSpeed ZeRO 1 to 3 on gloo: saved through A, loaded through B."""

import os

import rig

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
torch, deepspeed = rig.need("torch", "deepspeed")


def engine(stage, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    e, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config,
                                 dist_init_required=False)
    return e


def weights(e):
    with deepspeed.zero.GatheredParameters(list(e.module.parameters())):
        return {n: p.detach().clone() for n, p in e.module.named_parameters()}


def work(rank, world, a, b):
    deepspeed.init_distributed("gloo", dist_init_required=False)
    for stage in (1, 2, 3):
        e = engine(stage, seed=stage)
        for step in range(2):
            torch.manual_seed(step * world + rank)
            e.backward(e(torch.randn(2, 64)).square().mean())
            e.step()
            e.save_checkpoint(f"{a}/zero{stage}", tag=f"step{step}")  # rewrites `latest`
        want = weights(e)
        again = engine(stage, seed=99)
        path, _ = again.load_checkpoint(f"{b}/zero{stage}")
        assert path and "step1" in path, path
        got = weights(again)
        for n in want:
            assert torch.equal(got[n], want[n]), (stage, n)


if __name__ == "__main__":
    rig.spawn(work, 2, str(rig.A), str(rig.B))
    rig.same_trees()
