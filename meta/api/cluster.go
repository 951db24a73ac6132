package api

import (
	"github.com/ckptfs/ckptfs/internal/cluster"
	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/ids"
)

// Reap removes orphans that nobody has open: the leader's own command.
type Reap struct{ Inos []ids.Ino }

// Kind returns KindReap.
func (*Reap) Kind() Kind { return KindReap }

// Code encodes or decodes the message.
func (m *Reap) Code(c *codec.Coder) { inos(c, &m.Inos) }

// FreeStep does one bounded piece of the queued freeing of extents: the
// leader's own command. Stepped answers.
type FreeStep struct{ Max uint32 }

// Kind returns KindFreeStep.
func (*FreeStep) Kind() Kind { return KindFreeStep }

// Code encodes or decodes the message.
func (m *FreeStep) Code(c *codec.Coder) { codec.VarInt(c, &m.Max) }

// Stepped answers FreeStep.
type Stepped struct{ More bool }

// Code encodes or decodes the message.
func (m *Stepped) Code(c *codec.Coder) { c.Bool(&m.More) }

// ChunkAt names a chunk on a disk.
type ChunkAt struct {
	Key  ids.ChunkKey
	Disk ids.DiskID
}

func chunkAt(c *codec.Coder, v *ChunkAt) {
	c.BlockID(&v.Key.Block)
	c.U8(&v.Key.Index)
	codec.VarInt(c, &v.Disk)
}

// ChunksFreed says that servers have durably deleted chunks of dead blocks.
type ChunksFreed struct{ Chunks []ChunkAt }

// Kind returns KindChunksFreed.
func (*ChunksFreed) Kind() Kind { return KindChunksFreed }

// Code encodes or decodes the message.
func (m *ChunksFreed) Code(c *codec.Coder) { codec.Slice(c, &m.Chunks, chunkAt) }

// PlaceChunk records that chunk Key now lies, durable, on Disk: a late chunk
// that was finished, a repaired or a moved one. It compares and sets the
// record's version: Changed when it is another, NotFound when the block is dead.
type PlaceChunk struct {
	Key     ids.ChunkKey
	Disk    ids.DiskID
	Version uint64 // of the block record
}

// Kind returns KindPlaceChunk.
func (*PlaceChunk) Kind() Kind { return KindPlaceChunk }

// Code encodes or decodes the message.
func (m *PlaceChunk) Code(c *codec.Coder) {
	c.BlockID(&m.Key.Block)
	c.U8(&m.Key.Index)
	codec.VarInt(c, &m.Disk)
	codec.VarInt(c, &m.Version)
}

// QueueRepair reports chunks found missing or damaged.
type QueueRepair struct {
	Chunks []ChunkAt // Disk: where it was expected; zero when missing
	Damage string    // what was seen, for people
}

// Kind returns KindQueueRepair.
func (*QueueRepair) Kind() Kind { return KindQueueRepair }

// Code encodes or decodes the message.
func (m *QueueRepair) Code(c *codec.Coder) {
	codec.Slice(c, &m.Chunks, chunkAt)
	c.String(&m.Damage)
}

// DiskReport is a chunk server's word on one of its disks.
type DiskReport struct {
	UUID     ids.UUID
	ID       ids.DiskID // zero: not registered yet
	Capacity uint64
	Free     uint64
	Chunks   uint64
	ReadOnly bool
	Reason   string
}

func diskReport(c *codec.Coder, d *DiskReport) {
	c.UUID(&d.UUID)
	codec.VarInt(c, &d.ID)
	codec.VarInt(c, &d.Capacity)
	codec.VarInt(c, &d.Free)
	codec.VarInt(c, &d.Chunks)
	c.Bool(&d.ReadOnly)
	c.String(&d.Reason)
}

// RegisterServer makes a chunk server and its disks known, or confirms them.
// Repeating it is harmless: UUIDs decide. Registered answers.
type RegisterServer struct {
	UUID    ids.UUID // of the server, kept on its disks
	Cluster ids.UUID // zero when the disks are new; else must be ours
	Addr    string
	Host    string
	Rack    string
	Disks   []DiskReport
}

// Kind returns KindRegisterServer.
func (*RegisterServer) Kind() Kind { return KindRegisterServer }

// Code encodes or decodes the message.
func (m *RegisterServer) Code(c *codec.Coder) {
	c.UUID(&m.UUID)
	c.UUID(&m.Cluster)
	c.String(&m.Addr)
	c.String(&m.Host)
	c.String(&m.Rack)
	codec.Slice(c, &m.Disks, diskReport)
}

// Registered answers RegisterServer; Disks are in the order of the request.
type Registered struct {
	Cluster     ids.UUID
	Incarnation ids.Incarnation
	Server      ids.ServerID
	Disks       []ids.DiskID
}

// Code encodes or decodes the message.
func (m *Registered) Code(c *codec.Coder) {
	c.UUID(&m.Cluster)
	codec.VarInt(c, &m.Incarnation)
	codec.VarInt(c, &m.Server)
	codec.Slice(c, &m.Disks, func(c *codec.Coder, d *ids.DiskID) { codec.VarInt(c, d) })
}

// UpdateDisks changes the recorded state of disks: the leader's own command.
type UpdateDisks struct{ Disks []cluster.Disk }

// Kind returns KindUpdateDisks.
func (*UpdateDisks) Kind() Kind { return KindUpdateDisks }

// Code encodes or decodes the message.
func (m *UpdateDisks) Code(c *codec.Coder) {
	codec.Slice(c, &m.Disks, func(c *codec.Coder, d *cluster.Disk) {
		codec.VarInt(c, &d.ID)
		codec.VarInt(c, &d.State)
		codec.VarInt(c, &d.Capacity)
		codec.VarInt(c, &d.Free)
	})
}

// SetFeature raises the feature level that keys the state machine's behaviour.
type SetFeature struct{ Level uint32 }

// Kind returns KindSetFeature.
func (*SetFeature) Kind() Kind { return KindSetFeature }

// Code encodes or decodes the message.
func (m *SetFeature) Code(c *codec.Coder) { codec.VarInt(c, &m.Level) }

// Heartbeat is a chunk server's report, about every second; Orders answers.
type Heartbeat struct {
	Server ids.ServerID
	Boot   uint64 // changes with every start of the process
	Disks  []DiskReport
	// Freed lists the outcome of earlier orders.
	Freed []ChunkAt
	Done  []JobResult
	// Room is how many more jobs the server would take.
	Room uint32
}

// Kind returns KindHeartbeat.
func (*Heartbeat) Kind() Kind { return KindHeartbeat }

// Code encodes or decodes the message.
func (m *Heartbeat) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Server)
	c.U64(&m.Boot)
	codec.Slice(c, &m.Disks, diskReport)
	codec.Slice(c, &m.Freed, chunkAt)
	codec.Slice(c, &m.Done, func(c *codec.Coder, r *JobResult) {
		codec.VarInt(c, &r.Job)
		codec.VarInt(c, &r.Err)
		c.String(&r.Text)
	})
	codec.VarInt(c, &m.Room)
}

// JobResult is the outcome of one job.
type JobResult struct {
	Job  uint64
	Err  uint16 // errkind.Kind
	Text string
}

// JobKind says what a chunk server is asked to do.
type JobKind uint8

// The kinds of job.
const (
	JobRepair  JobKind = iota + 1 // rebuild chunk Key of Block on Target, then PlaceChunk
	JobCompact                    // rewrite [Off, End) of Ino, then Commit with OpReplace
)

// Job is one order to a chunk server.
type Job struct {
	ID     uint64
	Kind   JobKind
	Block  ids.Block // JobRepair
	Index  uint8     // JobRepair
	Target ids.DiskID
	Ino    ids.Ino // JobCompact
	Off    uint64
	End    uint64
}

// Orders answers Heartbeat.
type Orders struct {
	ClusterVersion uint64
	// Delete lists chunks of dead blocks to remove; acknowledged in Freed.
	Delete []ChunkAt
	Jobs   []Job
	// Unknown says that the leader does not know the server: register again.
	Unknown bool
}

// Code encodes or decodes the message.
func (m *Orders) Code(c *codec.Coder) {
	codec.VarInt(c, &m.ClusterVersion)
	codec.Slice(c, &m.Delete, chunkAt)
	codec.Slice(c, &m.Jobs, func(c *codec.Coder, j *Job) {
		codec.VarInt(c, &j.ID)
		codec.VarInt(c, &j.Kind)
		if j.Kind == JobRepair {
			c.Block(&j.Block)
		}
		c.U8(&j.Index)
		codec.VarInt(c, &j.Target)
		codec.VarInt(c, &j.Ino)
		codec.VarInt(c, &j.Off)
		codec.VarInt(c, &j.End)
	})
	c.Bool(&m.Unknown)
}

// Verdicts asks what to do with chunks that a disk holds (data-path rule 17);
// VerdictList answers, in order.
type Verdicts struct {
	Disk   ids.DiskID
	Chunks []ids.ChunkKey
	// Writers[i] is the session named in the header of Chunks[i]: a repair job
	// writes chunks of blocks of other sessions. Empty means each block's own.
	Writers []ids.Session
}

// Kind returns KindVerdicts.
func (*Verdicts) Kind() Kind { return KindVerdicts }

// Code encodes or decodes the message.
func (m *Verdicts) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Disk)
	codec.Slice(c, &m.Chunks, func(c *codec.Coder, k *ids.ChunkKey) {
		c.BlockID(&k.Block)
		c.U8(&k.Index)
	})
	sessions(c, &m.Writers)
	if c.Reading() && c.Err() == nil && len(m.Writers) != 0 && len(m.Writers) != len(m.Chunks) {
		c.Fail("%d writers of %d chunks", len(m.Writers), len(m.Chunks))
	}
}

// Verdict on a chunk.
type Verdict uint8

// The verdicts.
const (
	VerdictKeep Verdict = iota
	VerdictDelete
	VerdictNotYet
)

// VerdictList answers Verdicts.
type VerdictList struct{ Verdicts []Verdict }

// Code encodes or decodes the message.
func (m *VerdictList) Code(c *codec.Coder) {
	codec.Slice(c, &m.Verdicts, func(c *codec.Coder, v *Verdict) { codec.VarInt(c, v) })
}

// GetCluster asks for the cluster map; ClusterMap answers (empty but for the
// version when it is still Have).
type GetCluster struct{ Have uint64 }

// Kind returns KindGetCluster.
func (*GetCluster) Kind() Kind { return KindGetCluster }

// Code encodes or decodes the message.
func (m *GetCluster) Code(c *codec.Coder) { codec.VarInt(c, &m.Have) }

// StatFS asks for the file system's totals; Totals answers.
type StatFS struct{}

// Kind returns KindStatFS.
func (*StatFS) Kind() Kind { return KindStatFS }

// Code does nothing.
func (*StatFS) Code(*codec.Coder) {}

// Totals answers StatFS. Bytes are raw, before redundancy; Layout is the
// root's, so that a client can show usable bytes.
type Totals struct {
	Capacity, Free uint64
	Inodes         uint64
	Bytes          uint64 // live, before redundancy
	Layout         ids.Layout
}

// Code encodes or decodes the message.
func (m *Totals) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Capacity)
	codec.VarInt(c, &m.Free)
	codec.VarInt(c, &m.Inodes)
	codec.VarInt(c, &m.Bytes)
	c.Layout(&m.Layout)
}

// GetStatus asks for the cluster's health; Status answers.
type GetStatus struct{}

// Kind returns KindStatus.
func (*GetStatus) Kind() Kind { return KindStatus }

// Code does nothing.
func (*GetStatus) Code(*codec.Coder) {}

// Member is one metadata server.
type Member struct {
	ID     uint64
	Addr   string
	Leader bool
	Voter  bool
}

// Status answers GetStatus.
type Status struct {
	Map          cluster.Map
	Members      []Member
	Totals       Totals
	Sessions     uint64
	Orphans      uint64
	DeadBlocks   uint64 // chunks that wait to be deleted
	RepairQueue  uint64
	Blocks       uint64
	FeatureLevel uint32
	Applied      uint64 // log index
	Warnings     []string
}

// Code encodes or decodes the message.
func (m *Status) Code(c *codec.Coder) {
	m.Map.Code(c)
	codec.Slice(c, &m.Members, func(c *codec.Coder, v *Member) {
		codec.VarInt(c, &v.ID)
		c.String(&v.Addr)
		c.Bool(&v.Leader)
		c.Bool(&v.Voter)
	})
	m.Totals.Code(c)
	codec.VarInt(c, &m.Sessions)
	codec.VarInt(c, &m.Orphans)
	codec.VarInt(c, &m.DeadBlocks)
	codec.VarInt(c, &m.RepairQueue)
	codec.VarInt(c, &m.Blocks)
	codec.VarInt(c, &m.FeatureLevel)
	codec.VarInt(c, &m.Applied)
	codec.Slice(c, &m.Warnings, func(c *codec.Coder, s *string) { c.String(s) })
}

// Pushed is the body of every push.
type Pushed struct {
	Version uint64  // PushClusterChanged
	Ino     ids.Ino // PushRecall: of which directory, zero: of the whole tree
}

// Code encodes or decodes the message.
func (m *Pushed) Code(c *codec.Coder) {
	codec.VarInt(c, &m.Version)
	codec.VarInt(c, &m.Ino)
}
