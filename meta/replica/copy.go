package replica

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/meta/kv"
	"github.com/ckptfs/ckptfs/meta/replica/log"
)

// A copy of the store travels in chunks: CRC32C of what follows, kind, content.
const (
	chunkHeader  = 1 // raft's MsgSnap and the replica's state
	chunkRecords = 2
	chunkEnd     = 3 // number of records
	chunkPrefix  = 5
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sealChunk(p []byte) []byte {
	binary.LittleEndian.PutUint32(p, crc32.Checksum(p[4:], castagnoli))
	return p
}

func newChunk(kind byte) []byte { return append(make([]byte, 4, SnapshotChunk+4096), kind) }

type copyHeader struct{ message, state []byte }

// Code encodes or decodes the header.
func (h *copyHeader) Code(c *codec.Coder) {
	c.Bytes(&h.message)
	c.Bytes(&h.state)
}

// copyRecord is one record of the store.
type copyRecord struct{ key, value []byte }

// Code encodes or decodes the record.
func (h *copyRecord) Code(c *codec.Coder) {
	c.Bytes(&h.key)
	c.Bytes(&h.value)
}

// sendCopy streams the store to a member that is too far behind for the log.
// The copy is of the last flush, which may be newer than what raft asked for.
func (r *Replica) sendCopy(m *pb.Message) {
	to := m.GetTo()
	r.cfg.Log.Info("streaming a copy of the metadata", "id", r.cfg.ID, "to", to)
	r.cfg.Transport.SendSnapshot(to, func(send func([]byte) error) error {
		err := r.cfg.Store.View(func(v kv.Reader) error { return streamCopy(v, m, send) })
		if err != nil {
			r.cfg.Log.Warn("streaming a copy of the metadata failed", "id", r.cfg.ID, "to", to, "error", err)
		}
		r.post(func() { r.loop.node.SnapshotSent(to, err == nil) })
		return err
	})
}

func streamCopy(v kv.Reader, m *pb.Message, send func([]byte) error) error {
	st, err := v.Get(stateKey)
	if err != nil {
		return err
	}
	msg, err := proto.Marshal(m)
	if err != nil {
		return fmt.Errorf("marshal raft message: %w", err)
	}
	if err := send(sealChunk(codec.Encode(newChunk(chunkHeader), &copyHeader{msg, st}))); err != nil {
		return err
	}
	count := uint64(0)
	chunk := newChunk(chunkRecords)
	var failed error
	err = v.Ascend([]byte{1}, nil, func(k, val []byte) bool {
		count++
		chunk = codec.Encode(chunk, &copyRecord{k, val})
		if len(chunk) < SnapshotChunk {
			return true
		}
		failed = send(sealChunk(chunk))
		chunk = newChunk(chunkRecords)
		return failed == nil
	})
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	if len(chunk) > chunkPrefix {
		if err := send(sealChunk(chunk)); err != nil {
			return err
		}
	}
	return send(sealChunk(binary.AppendUvarint(newChunk(chunkEnd), count)))
}

// incoming is a copy on its way into the store.
type incoming struct {
	message *pb.Message
	state   state
	content kv.Replacement
}

// Receiver takes one streamed copy of the leader's store. Not safe for
// concurrent use.
type Receiver struct {
	r     *Replica
	from  uint64
	in    incoming
	last  []byte
	hash  uint64
	count uint64
	ended bool // the last chunk was seen
	over  bool
}

// ReceiveSnapshot starts to receive a copy from member from; Busy while
// another is received.
func (r *Replica) ReceiveSnapshot(from uint64) (*Receiver, error) {
	if _, ok := r.cfg.Store.(kv.Replacer); !ok {
		return nil, errkind.Unsupported.Wrap("this metadata store cannot be replaced by a copy")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.mu.dead || r.mu.closing:
		return nil, r.stopped()
	case r.mu.receiving:
		return nil, errkind.Busy.Wrap("metadata server %d receives a copy already", r.cfg.ID)
	}
	r.mu.receiving = true
	return &Receiver{r: r, from: from}, nil
}

// Chunk takes the next chunk; an error ends the transfer.
func (c *Receiver) Chunk(p []byte) error {
	if err := c.chunk(p); err != nil {
		c.Abort()
		return fmt.Errorf("copy of the metadata from server %d: %w", c.from, err)
	}
	return nil
}

func (c *Receiver) chunk(p []byte) error {
	if c.over || c.ended {
		return errkind.Invalid.Wrap("a chunk after the end")
	}
	if len(p) < chunkPrefix || binary.LittleEndian.Uint32(p) != crc32.Checksum(p[4:], castagnoli) {
		return errkind.Corrupt.Wrap("a chunk fails its checksum")
	}
	body := p[chunkPrefix:]
	switch kind := p[4]; {
	case kind == chunkHeader && c.in.content == nil:
		return c.header(body)
	case kind == chunkRecords && c.in.content != nil:
		return c.records(body)
	case kind == chunkEnd && c.in.content != nil:
		n, w := binary.Uvarint(body)
		if w != len(body) || n != c.count || c.hash != c.in.state.hash {
			return errkind.Corrupt.Wrap("%d records with hash %016x arrived, %d with %016x were sent",
				c.count, c.hash, n, c.in.state.hash)
		}
		c.ended = true
		return nil
	}
	return errkind.Invalid.Wrap("chunk of kind %d out of place", p[4])
}

func (c *Receiver) header(p []byte) error {
	var h copyHeader
	if err := codec.Decode(p, &h); err != nil {
		return errkind.Corrupt.Wrap("header: %v", err)
	}
	c.in.message = &pb.Message{}
	if err := proto.Unmarshal(h.message, c.in.message); err != nil {
		return errkind.Corrupt.Wrap("header: %v", err)
	}
	if err := codec.Decode(h.state, &c.in.state); err != nil {
		return errkind.Corrupt.Wrap("header: %v", err)
	}
	m := c.in.message
	if m.GetType() != pb.MsgSnap || m.GetFrom() != c.from || m.GetTo() != c.r.cfg.ID {
		return errkind.Invalid.Wrap("header names a %s from %d to %d", m.GetType(), m.GetFrom(), m.GetTo())
	}
	content, err := c.r.cfg.Store.(kv.Replacer).Replace()
	if err != nil {
		return err
	}
	c.in.content = content
	// Being caught up is each member's own matter.
	c.in.state.newborn = c.r.isNewborn()
	return content.Put(stateKey, c.in.state.encode())
}

func (r *Replica) isNewborn() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.newborn
}

func (c *Receiver) records(p []byte) error {
	for len(p) > 0 {
		var rec copyRecord
		rest, err := codec.DecodePrefix(p, &rec)
		if err != nil {
			return errkind.Corrupt.Wrap("record %d: %v", c.count, err)
		}
		p = rest
		if bytes.Compare(rec.key, c.last) <= 0 || rec.key[0] == 0 {
			return errkind.Corrupt.Wrap("record %q after %q", rec.key, c.last)
		}
		c.last = append(c.last[:0], rec.key...)
		c.hash += kv.RecordHash(rec.key, rec.value)
		c.count++
		if err := c.in.content.Put(rec.key, rec.value); err != nil {
			return err
		}
	}
	return nil
}

// Finish hands the verified copy over for installation, which follows on its
// own, unless the copy is no longer needed.
func (c *Receiver) Finish() error {
	if c.over || !c.ended {
		c.Abort()
		return errkind.Corrupt.Wrap("copy of the metadata from server %d ended early", c.from)
	}
	c.over = true
	in := c.in
	c.r.post(func() { c.r.offer(&in) })
	return nil
}

// Abort drops what was received. Harmless after Finish.
func (c *Receiver) Abort() {
	if c.over {
		return
	}
	c.over = true
	if c.in.content != nil {
		c.in.content.Abort()
	}
	c.r.received()
}

func (r *Replica) received() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.receiving = false
}

// offer asks raft whether the copy is wanted. If so, its next work holds an
// Append with the snapshot, and beginInstall follows.
func (r *Replica) offer(in *incoming) {
	l := &r.loop
	in.message.Snapshot = &pb.Snapshot{Metadata: &pb.SnapshotMetadata{
		Index: new(in.state.index), Term: new(in.state.term),
		ConfState: &pb.ConfState{Voters: in.state.voters},
	}}
	l.incoming = in
	if err := l.node.Step(in.message); err != nil {
		r.cfg.Log.Debug("copy of the metadata dropped", "id", r.cfg.ID, "error", err)
	}
	r.workOff()
	if l.incoming != nil {
		// Refused: an older term, or the log has caught up meanwhile.
		l.incoming = nil
		in.content.Abort()
		r.received()
	}
}

// beginInstall shuts the views out until the store is exchanged.
func (r *Replica) beginInstall(a *Append) *incoming {
	l := &r.loop
	in := l.incoming
	if in == nil || in.state.index != a.Snapshot.GetMetadata().GetIndex() {
		panic("raft accepted a snapshot that was not offered")
	}
	l.incoming, l.installing = nil, true
	r.over.BeginReplace()
	return in
}

// install puts the copy in the store's place. The intent in the log lets a
// start after a crash between the two steps finish the second.
func (r *Replica) install(j diskJob) error {
	if !r.awaitFlush() {
		return errStopped
	}
	m := snapshotMarker(j.append.Snapshot)
	err := r.log.Append([]log.Write{{Group: onlyGroup, Intent: &m}}, true)
	if err == nil {
		err = j.install.content.Commit()
	}
	if err == nil {
		err = r.log.Append([]log.Write{{
			Group: onlyGroup, Reset: &m, Entries: j.append.Entries, Hard: j.append.Hard,
		}}, true)
	}
	if err != nil {
		return fmt.Errorf("install a copy of the metadata: %w", err)
	}
	r.post(func() { r.installed(j) })
	return nil
}

func (r *Replica) installed(j diskJob) {
	l := &r.loop
	st := j.install.state
	l.applied, l.flushed, l.installing = st, st, false
	r.over.EndReplace(st.hash)
	r.storage.SetSnapshot(st.marker())
	r.received()
	r.cfg.Log.Info("a copy of the metadata is installed", "id", r.cfg.ID, "index", st.index)
	if j.append.Sync {
		l.node.Stored(j.append)
	}
}
