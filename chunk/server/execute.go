package server

import (
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/chunk/wire"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// execute does a request's work on the disk. A nil reply without an error
// means that the answer comes later.
func (s *Server) execute(d *disk, it *item) (*Reply, error) {
	switch m := it.req.Body.(type) {
	case *wire.Open:
		return s.open(d, it, m)
	case *wire.Put:
		return s.put(d, it, m)
	case *wire.Seal:
		return s.seal(d, it, m)
	case *wire.Store:
		return s.write(d, it, m)
	case *wire.Read:
		return s.read(d, it, m)
	case *wire.ChunkRef:
		if it.req.Op == wire.OpStat {
			return s.stat(d, m)
		}
		s.abort(d, it, m)
		return nil, nil
	}
	return nil, errkind.Unsupported.Wrap("operation %s", it.req.Op)
}

func reply(m wire.Response) *Reply { return &Reply{Response: m} }

func (s *Server) open(d *disk, it *item, m *wire.Open) (*Reply, error) {
	err := d.store.Open(header(m))
	s.mu.Lock()
	defer s.mu.Unlock()
	oc := it.chunk
	if err != nil {
		s.forget(oc)
		return nil, fmt.Errorf("open chunk %s on disk %d: %w", m.Key, m.Disk, err)
	}
	oc.state = stateOpen
	s.touch(oc)
	if it.cancelled || oc.unwanted {
		s.beginAbort(oc)
		return nil, errCancelled
	}
	oc.conn, oc.openID = it.conn, it.id
	it.conn.granted[it.id] = oc
	return reply(wire.Response{Body: &wire.Grant{Credit: uint32(oc.credit)}}), nil
}

// verify checks a payload against the sums that came with it.
func verify(key ids.ChunkKey, off uint32, data []byte, sums []uint64, granuleLog uint8) error {
	granule := 1 << granuleLog
	if off%uint32(granule) != 0 || len(data) == 0 || len(sums) != (len(data)+granule-1)/granule {
		return errkind.Invalid.Wrap("chunk %s: %d bytes at %d with %d sums do not fit granules of %d bytes", key, len(data), off, len(sums), granule)
	}
	for i, want := range sums {
		if got := xxh3.Hash(data[i*granule : min((i+1)*granule, len(data))]); got != want {
			return errkind.Corrupt.Wrap("chunk %s: granule at %d arrived with checksum %016x, sent was %016x", key, int(off)+i*granule, got, want)
		}
	}
	return nil
}

func (s *Server) put(d *disk, it *item, m *wire.Put) (*Reply, error) {
	if it.chunk == nil {
		return nil, errkind.Invalid.Wrap("put to chunk %s on disk %d without bytes", m.Key, m.Disk)
	}
	if err := verify(m.Key, m.Off, it.buf, m.Sums, it.chunk.msg.Granule); err != nil {
		return nil, fmt.Errorf("put to disk %d: %w", m.Disk, err)
	}
	if err := d.store.Put(m.Key, m.Off, it.buf, m.Sums); err != nil {
		return nil, fmt.Errorf("put to chunk %s on disk %d: %w", m.Key, m.Disk, err)
	}
	return reply(wire.Response{Body: &wire.Grant{}}), nil // finish fills in the credit
}

func (s *Server) seal(d *disk, it *item, m *wire.Seal) (*Reply, error) {
	s.mu.Lock()
	oc := s.mu.open[chunkAt{m.Disk, m.Key}]
	if oc != nil {
		if oc.state != stateOpen {
			s.mu.Unlock()
			return nil, s.busy(5*time.Millisecond, fmt.Sprintf("chunk %s on disk %d is being opened, sealed or aborted", m.Key, m.Disk))
		}
		oc.state = stateSealing
	}
	s.mu.Unlock()
	sealed, err := d.store.Seal(m.Key, m.Length)
	s.mu.Lock()
	if oc != nil && err == nil {
		s.forget(oc)
	} else if oc != nil {
		oc.state = stateOpen
		s.touch(oc)
	}
	s.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("seal chunk %s on disk %d at %d: %w", m.Key, m.Disk, m.Length, err)
	}
	if sealed.Digest != m.Digest {
		return nil, errkind.Conflict.Wrap("seal chunk %s on disk %d at %d: its digest is %016x, the client's %016x", m.Key, m.Disk, m.Length, sealed.Digest, m.Digest)
	}
	s.awaitSync(d, it, sealed.Ticket, reply(wire.Response{Body: &wire.Sealed{Digest: sealed.Digest}}))
	return nil, nil
}

func (s *Server) write(d *disk, it *item, m *wire.Store) (*Reply, error) {
	if err := verify(m.Key, 0, it.buf, m.Sums, m.Granule); err != nil {
		return nil, fmt.Errorf("store on disk %d: %w", m.Disk, err)
	}
	sealed, err := d.store.Write(header(&m.Open), it.buf, m.Sums)
	if err != nil {
		return nil, fmt.Errorf("store chunk %s on disk %d: %w", m.Key, m.Disk, err)
	}
	s.awaitSync(d, it, sealed.Ticket, reply(wire.Response{Body: &wire.Sealed{Digest: sealed.Digest}}))
	return nil, nil
}

// abort does what beginAbort has begun.
func (s *Server) abort(d *disk, it *item, m *wire.ChunkRef) {
	err := d.store.Delete([]ids.ChunkKey{m.Key})
	s.mu.Lock()
	s.forget(it.chunk)
	s.mu.Unlock()
	s.admitWaiting()
	if err != nil {
		// The chunk stays in the store, open: garbage collection finds it.
		s.cfg.Log.Warn("an aborted chunk could not be deleted", slog.String("chunk", m.Key.String()), slog.Uint64("disk", uint64(m.Disk)), slog.Any("error", err))
	}
}

func (s *Server) stat(d *disk, m *wire.ChunkRef) (*Reply, error) {
	s.mu.Lock()
	oc := s.mu.open[chunkAt{m.Disk, m.Key}]
	if oc != nil {
		st := &wire.Stat{State: uint8(chunk.StateOpen), Length: uint32(oc.end), Granule: oc.msg.Granule}
		s.mu.Unlock()
		return reply(wire.Response{Body: st}), nil
	}
	s.mu.Unlock()
	rd, err := d.store.Pin(m.Key)
	if err != nil {
		return nil, fmt.Errorf("stat chunk %s on disk %d: %w", m.Key, m.Disk, err)
	}
	defer rd.Close()
	st := &wire.Stat{State: uint8(chunk.StateSealed), Length: rd.Length(), Digest: rd.Digest(), Granule: rd.Header().Granule}
	st.Sums = append(st.Sums, rd.Sums()...)
	return reply(wire.Response{Body: st}), nil
}

func (s *Server) read(d *disk, it *item, m *wire.Read) (*Reply, error) {
	rd, err := d.store.Pin(m.Key)
	if err != nil {
		return nil, fmt.Errorf("read chunk %s on disk %d: %w", m.Key, m.Disk, err)
	}
	r, err := s.readPinned(it, m, rd)
	if err != nil {
		return nil, fmt.Errorf("read chunk %s on disk %d, %d bytes at %d: %w", m.Key, m.Disk, m.Len, m.Off, err)
	}
	return r, nil
}

func (s *Server) readPinned(it *item, m *wire.Read, rd chunk.Reader) (*Reply, error) {
	granuleLog := rd.Header().Granule
	granule, end := uint64(1)<<granuleLog, uint64(m.Off)+uint64(m.Len)
	length := uint64(rd.Length())
	if end > length {
		rd.Close()
		return nil, errkind.Range.Wrap("the chunk has %d bytes", length)
	}
	if m.Len == 0 || m.Len > wire.MaxPayload || uint64(m.Off)%granule != 0 || end%granule != 0 && end != length {
		rd.Close()
		return nil, errkind.Invalid.Wrap("the range does not fit granules of %d bytes", granule)
	}
	data := &wire.Data{Length: rd.Length(), Granule: granuleLog, Digest: rd.Digest()}
	sums := rd.Sums()[uint64(m.Off)/granule : (end+granule-1)/granule]
	data.Sums = append(data.Sums, sums...)
	r := reply(wire.Response{Body: data})
	if it.conn.files {
		if f, off := rd.Section(); f != nil {
			warm(f, off+int64(m.Off), int(m.Len))
			r.File, r.FileOff, r.FileLen, r.release = f, off+int64(m.Off), int(m.Len), rd.Close
			return r, nil
		}
	}
	buf, free, err := s.readBuffer(it, int64(m.Len))
	if err != nil || buf == nil {
		rd.Close()
		return nil, err
	}
	if n, err := rd.ReadAt(buf, int64(m.Off)); n < len(buf) {
		rd.Close()
		free()
		return nil, err
	}
	rd.Close()
	r.Payload, r.release = buf, free
	return r, nil
}

// readBuffer takes a buffer for a reply. When there is none the request is
// parked until one is given back, and the buffer is nil. A connection whose
// client does not read gets at most half of them.
func (s *Server) readBuffer(it *item, n int64) ([]byte, func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := it.conn
	if c.reads > 0 && c.reads+n > s.mu.reads.limit/2 || !s.mu.reads.take(n) {
		s.mu.parked = append(s.mu.parked, it)
		it.disk.parked++
		return nil, nil, nil
	}
	buf, err := s.pool.get(int(n))
	if err != nil {
		s.mu.reads.give(n)
		return nil, nil, s.busy(100*time.Millisecond, fmt.Sprintf("no memory for %d bytes: %v", n, err))
	}
	c.reads += n
	return buf, func() {
		s.pool.put(buf)
		s.mu.Lock()
		c.reads -= n
		s.mu.reads.give(n)
		s.unpark()
		s.mu.Unlock()
	}, nil
}

// unpark lets the reads that found no buffer try again, before all others.
func (s *Server) unpark() {
	for _, it := range slices.Backward(s.mu.parked) {
		q := &it.disk.queues[it.req.Class]
		*q = slices.Insert(*q, 0, it)
		it.state = itemQueued
		it.disk.parked--
		it.disk.work.Signal()
	}
	s.mu.parked = nil
}
