# fio --verify, git, rsync, tar, sqlite3: through A, checked through B.
set -euo pipefail
A=$CLIENT_A B=$CLIENT_B
for t in fio git rsync tar sqlite3; do
	command -v "$t" >/dev/null || { echo "not installed: $t"; exit 77; }
done

echo "== fio"
common=(--ioengine=psync --size=24M --verify=crc32c --verify_fatal=1 --do_verify=1 --output=/dev/null)
fio --name=seq --directory="$A" --rw=write --bs=1M "${common[@]}"
fio --name=rand --directory="$A" --rw=randwrite --bs=4k --fsync=64 "${common[@]}"
fio --name=mix --directory="$A" --rw=randrw --bsrange=512-64k --bs_unaligned=1 "${common[@]}"
fio --name=direct --directory="$A" --rw=randwrite --bs=4k --direct=1 "${common[@]}"
fio --name=map --directory="$A" --rw=randwrite --bs=4k --ioengine=mmap --size=8M --verify=crc32c --output=/dev/null
for f in "$A"/*.0; do cmp "$f" "$B/$(basename "$f")"; done

echo "== git"
git init -q "$A/src"
cd "$A/src"
git config user.name x
git config user.email x@localhost
for i in $(seq 60); do
	mkdir -p "d$((i % 7))"
	seq "$i" $((i * 50)) >"d$((i % 7))/f$i"
done
git add . && git commit -qm one
git mv d1 moved && git commit -qam two
git clone -q "$A/src" "$B/clone"
cd "$B/clone"
git fsck --strict
test -z "$(git status --porcelain)"
diff -r --exclude=.git "$A/src" "$A/clone"
cd /

echo "== rsync, twice"
rsync -a "$A/src/" "$A/copy/"
test -z "$(rsync -ai "$A/src/" "$B/copy/")"
diff -r "$A/src" "$B/copy"

echo "== tar"
tar -C "$A" -cf "$A/t.tar" src
mkdir "$B/untar"
tar -C "$B/untar" -xf "$B/t.tar"
diff -r "$A/src" "$A/untar/src"

echo "== sqlite3"
for mode in DELETE WAL; do
	db=$A/$mode.db
	{
		echo "PRAGMA journal_mode=$mode; CREATE TABLE t(k INTEGER PRIMARY KEY, v BLOB);"
		for i in $(seq 150); do
			echo "INSERT INTO t VALUES($i, randomblob(2000)); UPDATE t SET v = randomblob(1500) WHERE k = $((i / 2));"
		done
		echo "DELETE FROM t WHERE k % 3 = 0; VACUUM;"
	} | sqlite3 "$db" >/dev/null
	test "$(sqlite3 "$db" 'PRAGMA integrity_check; SELECT count(*) FROM t;' | tr '\n' ' ')" = "ok 100 "
	test "$(sqlite3 "$B/$mode.db" 'PRAGMA integrity_check; SELECT count(*) FROM t;' | tr '\n' ' ')" = "ok 100 "
done
