package log

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const group1 = 1

func small() Options { return Options{SegmentSize: 16 << 10, CacheBytes: 2 << 10} }

func mustOpen(t require.TestingT, fsys vfs.FS) *Log {
	l, err := Open(fsys, "log", small())
	require.NoError(t, err)
	return l
}

func entry(index, term uint64, data string) *pb.Entry {
	return &pb.Entry{Index: new(index), Term: new(term), Type: pb.EntryNormal.Enum(), Data: []byte(data)}
}

func add(t require.TestingT, l *Log, entries ...*pb.Entry) {
	require.NoError(t, l.Append([]Write{{Group: group1, Entries: entries}}, true))
}

// read returns all entries as "index/term=data".
func read(t require.TestingT, l *Log) (out []string) {
	s := l.Storage(group1)
	first, _ := s.FirstIndex()
	last, _ := s.LastIndex()
	if last < first {
		return nil
	}
	entries, err := s.Entries(first, last+1, 1<<40)
	require.NoError(t, err)
	for i, e := range entries {
		require.Equal(t, first+uint64(i), e.GetIndex())
		term, err := s.Term(e.GetIndex())
		require.NoError(t, err)
		require.Equal(t, term, e.GetTerm())
		out = append(out, show(e))
	}
	return out
}

func show(e *pb.Entry) string { return fmt.Sprintf("%d/%d=%s", e.GetIndex(), e.GetTerm(), e.GetData()) }

// model is the log as raft sees it: what is acknowledged, and what may be there
// on top after a crash.
type model struct {
	entries []*pb.Entry // entries[i] has index i+1
	first   uint64
}

// Whatever is appended, overwritten, compacted and crashed: what was synced is
// there again, and nothing else is but a prefix of the write under way.
func TestLogAgainstAModelWithCrashes(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mem := vfs.NewMem()
		l := mustOpen(rt, mem)
		m := model{first: 1}
		for range rapid.IntRange(1, 25).Draw(rt, "steps") {
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0, 1, 2:
				m.append(rt, l)
			case 3:
				require.NoError(rt, l.Prepare())
			case 4:
				m.compact(rt, l)
			case 5:
				mem, l = m.crash(rt, mem, l)
			}
			require.Equal(rt, m.show(), read(rt, l))
		}
		require.NoError(rt, l.Close())
		l = mustOpen(rt, mem)
		require.Equal(rt, m.show(), read(rt, l))
		require.NoError(rt, l.Close())
	})
}

func (m *model) show() (out []string) {
	for _, e := range m.entries[m.first-1:] {
		out = append(out, show(e))
	}
	return out
}

// draw makes a run of entries that may replace some of the last.
func (m *model) draw(t *rapid.T) []*pb.Entry {
	last := uint64(len(m.entries))
	from := last + 1
	if last > m.first {
		from = rapid.Uint64Range(max(m.first, last-min(last, 3))+1, last+1).Draw(t, "from")
	}
	n := rapid.IntRange(1, 6).Draw(t, "entries")
	out := make([]*pb.Entry, n)
	for i := range out {
		size := rapid.SampledFrom([]int{0, 10, 700, 3000}).Draw(t, "size")
		out[i] = entry(from+uint64(i), rapid.Uint64Range(1, 9).Draw(t, "term"), strings.Repeat("x", size))
	}
	return out
}

func (m *model) append(t *rapid.T, l *Log) {
	run := m.draw(t)
	add(t, l, run...)
	m.entries = append(m.entries[:run[0].GetIndex()-1:run[0].GetIndex()-1], run...)
}

func (m *model) compact(t *rapid.T, l *Log) {
	last := uint64(len(m.entries))
	if last == 0 {
		return
	}
	upTo := rapid.Uint64Range(0, last).Draw(t, "upTo")
	require.NoError(t, l.Compact(group1, upTo, int64(rapid.IntRange(0, 64<<10).Draw(t, "retain"))))
	first, _ := l.Storage(group1).FirstIndex()
	require.GreaterOrEqual(t, first, m.first)
	require.LessOrEqual(t, first, max(upTo+1, m.first))
	m.first = first
}

// crash cuts the power during an append. The append either never happened or
// a prefix of its frames is there.
func (m *model) crash(t *rapid.T, mem *vfs.Mem, l *Log) (*vfs.Mem, *Log) {
	rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
	run := m.draw(t)
	var after *vfs.Mem
	countdown := rapid.IntRange(0, 6).Draw(t, "operation")
	mem.SetHook(func(vfs.Call) error {
		if countdown--; countdown < 0 && after == nil {
			after = mem.CrashClone(rng)
		}
		return nil
	})
	err := l.Append([]Write{{Group: group1, Entries: run}}, true)
	require.NoError(t, err)
	mem.SetHook(nil)
	done := after == nil
	if done {
		after = mem.CrashClone(rng)
	}
	n := mustOpen(t, after)
	got := read(t, n)
	was := *m
	m.entries = append(append([]*pb.Entry(nil), m.entries[:run[0].GetIndex()-1]...), run...)
	if done || fmt.Sprint(got) == fmt.Sprint(m.show()) {
		require.Equal(t, m.show(), got, "what was acknowledged is gone")
	} else {
		*m = was
		require.Equal(t, m.show(), got, "neither before nor after the write")
	}
	return after, n
}

func TestEveryFlippedBitIsFoundOrHarmless(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem)
	for i := range uint64(6) {
		add(t, l, entry(i+1, 1, strings.Repeat("abc", 9)))
	}
	require.NoError(t, l.Append([]Write{{Group: group1, Hard: raftHard(1, 1, 6)}}, true))
	want := read(t, l)
	end := l.active().end
	require.NoError(t, l.Close())
	rng := rand.New(rand.NewPCG(1, 2))
	for off := int64(headerPage); off < end; off++ {
		c := mem.CrashClone(rng)
		require.True(t, c.Flip("log/"+segmentName(1), off, uint(off%8)))
		l, err := Open(c, "log", small())
		if err != nil {
			require.ErrorIs(t, err, errkind.Corrupt)
			continue
		}
		require.Equal(t, want, read(t, l), "offset %d", off)
		require.NoError(t, l.Close())
	}
	require.True(t, mem.Flip("log/"+segmentName(1), 9, 1))
	_, err := Open(mem, "log", small())
	require.ErrorIs(t, err, errkind.Corrupt)
}

func TestOldEntriesAreVerifiedWhenRead(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem)
	defer l.Close()
	for i := range uint64(5) {
		add(t, l, entry(i+1, 1, strings.Repeat("x", 1000)))
	}
	s := l.Storage(group1)
	got, err := s.Entries(1, 6, 1500)
	require.NoError(t, err)
	require.Len(t, got, 1)
	require.True(t, mem.Flip("log/"+segmentName(1), headerPage+500, 3))
	_, err = s.Entries(1, 2, 1<<20)
	require.ErrorIs(t, err, errkind.Corrupt)
}

func TestReset(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem)
	add(t, l, entry(1, 1, "a"), entry(2, 1, "b"))
	m := Marker{Index: 90, Term: 7, Voters: []uint64{1, 2, 3}}
	require.NoError(t, l.Append([]Write{{Group: group1, Intent: &m}}, true))
	require.Equal(t, &m, l.Storage(group1).Intent())
	require.NoError(t, l.Append([]Write{{Group: group1, Reset: &m}}, true))
	add(t, l, entry(91, 7, "c"))
	for range 2 {
		s := l.Storage(group1)
		require.Equal(t, []string{"91/7=c"}, read(t, l))
		require.Nil(t, s.Intent())
		_, cs, _ := s.InitialState()
		require.Equal(t, m.Voters, cs.Voters)
		term, err := s.Term(90)
		require.NoError(t, err)
		require.EqualValues(t, 7, term)
		_, err = s.Entries(2, 3, 1)
		require.ErrorIs(t, err, raft.ErrCompacted)
		require.NoError(t, l.Close())
		l = mustOpen(t, mem)
	}
	require.NoError(t, l.Close())
}

func TestAFailedSyncIsFinal(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem)
	boom := errors.New("boom")
	mem.SetHook(func(c vfs.Call) error {
		if c.Op == vfs.OpSync {
			return boom
		}
		return nil
	})
	w := []Write{{Group: group1, Entries: []*pb.Entry{entry(1, 1, "a")}}}
	require.Error(t, l.Append(w, true))
	mem.SetHook(nil)
	require.Error(t, l.Append(w, true))
	_ = l.Close()
}

// Each acknowledgement costs one write and one sync, also across segments once
// the next one is prepared.
func TestOneSyncPerAppend(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem)
	defer l.Close()
	add(t, l, entry(1, 1, ""))
	require.NoError(t, l.Prepare())
	calls := map[vfs.Op]int{}
	mem.SetHook(func(c vfs.Call) error { calls[c.Op]++; return nil })
	for i := range uint64(5) {
		require.NoError(t, l.Append([]Write{{Group: group1, Hard: raftHard(1, 1, i+1)}}, false))
		add(t, l, entry(i+2, 1, "x"))
	}
	mem.SetHook(nil)
	require.Equal(t, map[vfs.Op]int{vfs.OpWrite: 5, vfs.OpSync: 5}, calls)
	hs, _, _ := l.Storage(group1).InitialState()
	require.EqualValues(t, 5, hs.GetCommit())
}

func TestTwoGroupsShareALog(t *testing.T) {
	mem := vfs.NewMem()
	l := mustOpen(t, mem)
	for i := range uint64(40) {
		require.NoError(t, l.Append([]Write{
			{Group: 1, Entries: []*pb.Entry{entry(i+1, 1, strings.Repeat("a", 500))}},
			{Group: 2, Entries: []*pb.Entry{entry(i+1, 2, strings.Repeat("b", 500))}},
		}, true))
	}
	require.NoError(t, l.Compact(1, 40, 0))
	first, _ := l.Storage(1).FirstIndex()
	require.EqualValues(t, 1, first, "the other group's entries hold the segments")
	require.NoError(t, l.Close())
	l = mustOpen(t, mem)
	got, err := l.Storage(2).Entries(1, 41, 1<<40)
	require.NoError(t, err)
	require.Len(t, got, 40)
	require.NoError(t, l.Close())
}

func raftHard(term, vote, commit uint64) *pb.HardState {
	return &pb.HardState{Term: new(term), Vote: new(vote), Commit: new(commit)}
}

func goldenRecords() []record {
	return []record{
		entryRecord(1, entry(300, 4, "hello")), hardRecord(1, raftHard(4, 2, 299)),
		markerRecord(recordCompact, 1, Marker{Index: 128, Term: 3, Voters: []uint64{1, 2, 3}}),
		markerRecord(recordReset, 1, Marker{Index: 129, Term: 3, Voters: []uint64{1}}),
		markerRecord(recordIntent, 2, Marker{Index: 1000, Term: 5, Voters: []uint64{1, 300}}),
	}
}

func TestGolden(t *testing.T) {
	var b batch
	for _, r := range goldenRecords() {
		b.add(&r)
	}
	got := hex.Dump(encodeSegmentHeader(7)[:headerSize]) +
		hex.Dump(appendFrame(nil, frame{segment: 7, seq: 1000, synced: 999, payload: b.payload}))
	want, err := os.ReadFile("testdata/log.golden")
	require.NoError(t, err)
	require.Equal(t, string(want), got)
	f, ok := decodeFrame(appendFrame(nil, frame{segment: 7, seq: 1000, synced: 999, payload: b.payload}))
	require.True(t, ok)
	var kinds []recordKind
	require.NoError(t, decodeRecords(f.payload, func(r *record) error { kinds = append(kinds, r.kind); return nil }))
	require.Equal(t, []recordKind{recordEntry, recordHard, recordCompact, recordReset, recordIntent}, kinds)
}

func FuzzFrame(f *testing.F) {
	var b batch
	for _, r := range goldenRecords() {
		b.add(&r)
	}
	f.Add(appendFrame(nil, frame{segment: 7, seq: 1000, synced: 999, payload: b.payload}))
	f.Add([]byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, p []byte) {
		if fr, ok := decodeFrame(p); ok {
			require.Equal(t, p[:frameLength(p)], appendFrame(nil, fr)[:frameLength(p)])
		}
		_ = decodeRecords(p, func(r *record) error {
			var again record
			require.NoError(t, codec.Decode(codec.Encode(nil, r), &again))
			require.Equal(t, *r, again)
			return nil
		})
		_, _ = decodeSegmentHeader(p)
	})
}
