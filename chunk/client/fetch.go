package client

import (
	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/ec"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
)

// fetch asks for a range of a chunk, into direct if given. Called with the
// lock held.
func (r *reading) fetch(g *group, s *source, lo, hi int, direct []byte) {
	s.busy = false
	f := &fetch{src: s, lo: lo, hi: hi, buf: direct, since: r.c.sched.Now(), flight: true}
	if direct == nil {
		f.scratch = r.c.buffer(hi - lo)
		f.buf = f.scratch.p
	}
	g.fetches = append(g.fetches, f)
	r.mu.flight++
	req := &wire.Request{Op: wire.OpRead, Class: r.class, Dst: f.buf, Body: &wire.Read{
		Disk: s.disk, Key: r.key(s.index), Off: uint32(lo), Len: uint32(hi - lo),
	}}
	f.cancel = r.c.send(s.peer, req, fetchTimeout, func(rep reply) { r.fetched(f, rep) })
	whole := lo == 0 && hi == r.chunkLen
	if s.table == nil && !s.asking && !whole {
		r.askTable(s)
	}
}

// fetched takes a reply. Its bytes count once they are verified.
func (r *reading) fetched(f *fetch, rep reply) {
	sums, err := r.checkData(f, rep)
	r.mu.Lock()
	s := f.src
	f.took = rep.took
	if err == nil && s.table == nil && sums != nil {
		s.table = sums
		r.c.tables.add(r.key(s.index), r.b.Digests[s.index], sums)
	}
	table := s.table
	switch {
	case err != nil:
		f.state = fetchBad
		r.trouble(s, err, f.orphan)
	case table == nil && s.asking:
		s.waiting = append(s.waiting, f)
	case table == nil:
		f.state = fetchBad // the table could not be had
	}
	verify := f.state == fetchPending && table != nil && !f.orphan
	if !verify {
		r.landed(f)
		r.mu.Unlock()
		return
	}
	r.mu.Unlock()
	good := r.verify(f, table)
	r.mu.Lock()
	r.judge(f, good)
	r.landed(f)
	r.mu.Unlock()
}

// landed notes that the transport and the verification let go of a fetch.
func (r *reading) landed(f *fetch) {
	f.flight = false
	r.mu.flight--
	if f.orphan {
		r.c.free(f.scratch)
		f.scratch = nil
	}
	r.cond.Broadcast()
}

func (r *reading) verify(f *fetch, table []uint64) bool {
	g := r.b.Granule
	return ec.Check(f.buf, table[f.lo>>g:ec.Granules(f.hi, g)], g)
}

// judge records the outcome of a verification.
func (r *reading) judge(f *fetch, good bool) {
	if good {
		f.state = fetchGood
		f.src.fails = 0
		r.c.health.fetched(f.took)
		r.c.hedges.earn(f.hi - f.lo)
		return
	}
	f.state = fetchBad
	s := f.src
	err := errkind.Corrupt.Wrap("chunk %d on disk %d: bytes [%d, %d) do not match their checksums", s.index, s.disk, f.lo, f.hi)
	// Damage is of a range: the others of the chunk may be what another stripe needs.
	s.last, s.bad = err, append(s.bad, span{f.lo, f.hi, err})
	r.c.reportDamage(r.key(s.index), s.disk, err.Error())
}

// checkData compares a reply with the request and the block record. When the
// range is the whole chunk it returns the table that came with it, verified.
func (r *reading) checkData(f *fetch, rep reply) ([]uint64, error) {
	d, ok := bodyOf[*wire.Data](rep)
	i := f.src.index
	switch {
	case rep.err != nil:
		return nil, rep.err
	case !ok:
		return nil, errkind.Internal.Wrap("reply without a body")
	case d.Digest != r.b.Digests[i]:
		return nil, errkind.Corrupt.Wrap("digest %016x, the block record has %016x", d.Digest, r.b.Digests[i])
	case int(d.Length) != r.chunkLen || d.Granule != r.b.Granule:
		return nil, errkind.Corrupt.Wrap("length %d and granule 2^%d, the block record has %d and 2^%d", d.Length, d.Granule, r.chunkLen, r.b.Granule)
	case len(rep.Payload) != len(f.buf):
		return nil, errkind.Corrupt.Wrap("%d bytes instead of %d", len(rep.Payload), len(f.buf))
	}
	if &rep.Payload[0] != &f.buf[0] {
		copy(f.buf, rep.Payload)
	}
	if f.lo == 0 && f.hi == r.chunkLen {
		if len(d.Sums) != ec.Granules(r.chunkLen, r.b.Granule) || ec.Digest(d.Sums) != r.b.Digests[i] {
			return nil, errkind.Corrupt.Wrap("checksum table does not match its digest")
		}
		return d.Sums, nil
	}
	return nil, nil
}

// askTable asks for a chunk's whole checksum table.
func (r *reading) askTable(s *source) {
	s.asking = true
	r.mu.flight++
	req := &wire.Request{Op: wire.OpStat, Class: r.class, Body: &wire.ChunkRef{Disk: s.disk, Key: r.key(s.index)}}
	s.cancel = r.c.send(s.peer, req, fetchTimeout, func(rep reply) { r.tabled(s, rep) })
}

func (r *reading) tabled(s *source, rep reply) {
	sums, err := r.checkTable(s, rep)
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.cond.Broadcast()
	r.mu.flight--
	s.asking, s.cancel = false, nil
	waiting := s.waiting
	s.waiting = nil
	if err != nil {
		r.trouble(s, err, len(r.mu.active) == 0)
		for _, f := range waiting {
			f.state = fetchBad
		}
		return
	}
	s.table = sums
	r.c.tables.add(r.key(s.index), r.b.Digests[s.index], sums)
	for _, f := range waiting {
		if !f.orphan {
			r.judge(f, r.verify(f, sums))
		}
	}
}

func (r *reading) checkTable(s *source, rep reply) ([]uint64, error) {
	st, ok := bodyOf[*wire.Stat](rep)
	switch {
	case rep.err != nil:
		return nil, rep.err
	case !ok:
		return nil, errkind.Internal.Wrap("reply without a body")
	case chunk.State(st.State) != chunk.StateSealed:
		return nil, errkind.NoChunk.Wrap("chunk is not sealed")
	case int(st.Length) != r.chunkLen || st.Granule != r.b.Granule || len(st.Sums) != ec.Granules(r.chunkLen, r.b.Granule):
		return nil, errkind.Corrupt.Wrap("length %d, granule 2^%d, %d checksums: not what the block record says", st.Length, st.Granule, len(st.Sums))
	case ec.Digest(st.Sums) != r.b.Digests[s.index]:
		return nil, errkind.Corrupt.Wrap("checksum table does not match the block record's digest")
	}
	return st.Sums, nil
}

// trouble records a failure of a chunk. Damaged and missing ones are reported
// and not asked again; quiet failures are our own cancels.
func (r *reading) trouble(s *source, err error, quiet bool) {
	if quiet || s.gone != nil {
		return
	}
	s.last = err
	switch errkind.Of(err) {
	case errkind.NoChunk, errkind.Corrupt:
		s.gone = errkind.Of(err).Wrap("chunk %d on disk %d: %v", s.index, s.disk, err)
		r.c.reportDamage(r.key(s.index), s.disk, err.Error())
	case errkind.Busy:
		s.busy, s.retryAt = true, r.c.sched.Now()+retryAfter
	default:
		s.fails++
		s.retryAt = r.c.sched.Now() + retryAfter<<min(s.fails-1, 5)
	}
}
