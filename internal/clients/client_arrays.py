"""numpy maps, h5py, zarr and pyarrow."""

import numpy as np

import rig

h5py, zarr, pa, pq = rig.need("h5py", "zarr", "pyarrow", "pyarrow.parquet")

rng = np.random.default_rng(0)
data = rng.standard_normal((512, 1024))
np.save(rig.A / "a.npy", data)
assert np.array_equal(np.load(rig.B / "a.npy"), data)
assert np.array_equal(np.load(rig.B / "a.npy", mmap_mode="r"), data)
m = np.load(rig.A / "a.npy", mmap_mode="r+")
m[17] = 4.5
m[500, 3:9] = -1
m.flush()
data[17], data[500, 3:9] = 4.5, -1
assert np.array_equal(np.load(rig.B / "a.npy"), data)
mm = np.memmap(rig.A / "raw", dtype=np.int32, mode="w+", shape=(1 << 18,))
for _ in range(200):  # scattered stores
    i = int(rng.integers(0, 1 << 18))
    mm[i] = i
mm.flush()
assert np.array_equal(np.fromfile(rig.B / "raw", dtype=np.int32), np.array(mm))

with h5py.File(rig.A / "f.h5", "w") as f:
    f["x"] = data
    f.create_dataset("chunked", data=data, chunks=(64, 64), compression="gzip")
with h5py.File(rig.A / "f.h5", "r+") as f:
    f["x"][3] = 7
with h5py.File(rig.B / "f.h5", "r") as f:
    want = data.copy()
    want[3] = 7
    assert np.array_equal(f["x"][:], want) and np.array_equal(f["chunked"][:], data)

z = zarr.open(str(rig.A / "z"), mode="w", shape=data.shape, chunks=(100, 100), dtype="f8")
z[:] = data
z[50:60] = 1
want = data.copy()
want[50:60] = 1
assert np.array_equal(zarr.open(str(rig.B / "z"), mode="r")[:], want)

table = pa.table({"i": np.arange(100000), "x": rng.standard_normal(100000)})
pq.write_table(table, rig.A / "t.parquet", row_group_size=10000)
assert pq.read_table(rig.B / "t.parquet").equals(table)
assert pq.read_table(rig.B / "t.parquet", memory_map=True).equals(table)
with pa.OSFile(str(rig.A / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as w:
    w.write_table(table)
with pa.memory_map(str(rig.B / "t.arrow")) as source:
    assert pa.ipc.open_file(source).read_all().equals(table)
rig.same_trees()
