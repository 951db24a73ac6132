// Package mountnode joins the parts of a mount: the metadata client, the block
// client over its transport, the file engine and the FUSE side.
package mountnode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ckptfs/ckptfs/chunk/client"
	"github.com/ckptfs/ckptfs/chunk/transport"
	"github.com/ckptfs/ckptfs/fs"
	"github.com/ckptfs/ckptfs/fs/file"
	"github.com/ckptfs/ckptfs/fs/fuseconn"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
	"github.com/ckptfs/ckptfs/meta/api"
	metaclient "github.com/ckptfs/ckptfs/meta/client"
)

// Config is one mount.
type Config struct {
	Meta    []string // addresses of metadata servers
	Dir     string   // mount point
	Options Options
	Log     *slog.Logger
}

// Mount is a mounted file system and everything under it.
type Mount struct {
	cfg       Config
	sched     *sched.Real
	meta      *metaclient.Client
	transport *transport.Transport
	blocks    *client.Client
	engine    *file.Engine
	server    *fs.Server
	log       *slog.Logger
}

// Start connects to the cluster and mounts it.
func Start(ctx context.Context, cfg Config) (*Mount, error) {
	if err := cfg.Options.Validate(); err != nil {
		return nil, err
	}
	m := &Mount{cfg: cfg, sched: new(sched.Real), log: cfg.Log}
	if err := m.start(ctx); err != nil {
		return nil, errors.Join(err, m.release(ctx))
	}
	return m, nil
}

func (m *Mount) start(ctx context.Context) error {
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	old, err := ReadState(m.cfg.Dir)
	if err != nil {
		m.log.Warn("what an earlier mount of this path left cannot be read; its session ends by itself", "err", err)
	}
	if old.Live() {
		return errkind.Busy.Wrap("%s is being served by process %d; `ckptfs umount %s` first", m.cfg.Dir, old.PID, m.cfg.Dir)
	}
	o := &m.cfg.Options
	m.meta, err = metaclient.Dial(ctx, metaclient.Config{
		Addrs: m.cfg.Meta, Name: m.cfg.Dir, Host: host, Replaces: old.Secret,
		Sched: m.sched, Log: m.log, OpTimeout: o.OpTimeout,
		OnSession: func(ids.Session) { m.saveState() },
	})
	if err != nil {
		return fmt.Errorf("reach the metadata service at %v: %w", m.cfg.Meta, err)
	}
	m.transport = transport.New(transport.Config{Cluster: m.meta.Cluster(), Sched: m.sched, Log: m.log})
	m.blocks = client.New(client.Config{
		Transport: m.transport, Map: m.meta.Map, Reporter: reporter{m}, Sched: m.sched, Log: m.log,
	})
	var fsys *fs.FS
	m.engine = file.New(file.Config{
		Meta: m.meta, IDs: m.meta, Blocks: m.blocks, Sched: m.sched, Log: m.log,
		Budget: m.budget(), OpTimeout: o.OpTimeout,
		Invalidate: func(ino ids.Ino, off uint64, err error) { fsys.Invalidate(ino, off, err) },
	})
	m.meta.SetFloor(m.engine.Floor)
	fo := fuseOptions(o, m.cfg.Meta)
	fsys = fs.New(fs.Config{
		Meta: m.meta, Engine: fs.FileEngine(m.engine), Sched: m.sched, Log: m.log,
		KernelTimeout: min(o.KernelTimeout, DefaultKernelTimeout), Leases: m.meta, OpTimeout: o.OpTimeout, ReadMode: readMode(o.ReadMode),
		Atime: fo.Atime, NoDirAtime: fo.NoDirAtime, Session: m.meta.Session,
	})
	m.server, err = fs.Mount(ctx, m.cfg.Dir, fsys, fo)
	if err != nil {
		return err
	}
	m.saveState()
	return nil
}

func readMode(s string) fs.ReadMode {
	switch s {
	case "direct":
		return fs.ReadDirect
	case "cached":
		return fs.ReadCached
	}
	return fs.ReadAuto
}

// budget is the memory for buffers, in bytes: what was asked for, else 1 GiB
// or an eighth of the RAM, the smaller.
func (m *Mount) budget() int64 {
	if m.cfg.Options.BufferSize != 0 {
		return m.cfg.Options.BufferSize
	}
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return MinBuffer
	}
	return max(MinBuffer, min(1<<30, int64(si.Totalram)*int64(si.Unit)/8))
}

func fuseOptions(o *Options, meta []string) fuseconn.Options {
	has := func(name string) bool { return slices.Contains(o.Kernel, name) }
	f := fuseconn.Options{
		Source:     meta[0],
		AllowOther: os.Geteuid() == 0 || has("allow_other"),
		ReadOnly:   has("ro"),
		Dev:        os.Geteuid() == 0 && !has("nodev"),
		Suid:       os.Geteuid() == 0 && !has("nosuid"),
		NoExec:     has("noexec"),
		NoDirAtime: has("nodiratime"),
	}
	switch {
	case has("strictatime"):
		f.Atime = fuseconn.AtimeStrict
	case has("relatime"):
		f.Atime = fuseconn.AtimeRel
	}
	return f
}

// Done is closed when the file system has been unmounted, by whomever, and
// everything is committed.
func (m *Mount) Done() <-chan struct{} { return m.server.Done() }

// Dir is the mount point, free of symbolic links.
func (m *Mount) Dir() string { return m.server.Dir() }

// Unmount unmounts; kind Busy, and nothing changed, when files are in use.
func (m *Mount) Unmount(ctx context.Context) error { return m.server.Unmount(ctx) }

// Kill takes the mount away although files are in use.
func (m *Mount) Kill() error { return m.server.Kill() }

// Close waits for the unmount and releases everything. It returns an error
// when something that was written could not be stored.
func (m *Mount) Close(ctx context.Context) error {
	err := m.server.Wait()
	return errors.Join(err, m.release(ctx))
}

func (m *Mount) release(ctx context.Context) error {
	var errs []error
	if m.engine != nil && m.server == nil {
		errs = append(errs, m.engine.Close(ctx))
	}
	if m.blocks != nil {
		m.blocks.Close()
	}
	if m.meta != nil {
		errs = append(errs, m.meta.Close(ctx))
	}
	if m.transport != nil {
		m.transport.Close()
	}
	m.sched.Wait()
	if m.server != nil {
		errs = append(errs, removeState(m.cfg.Dir))
	}
	return errors.Join(errs...)
}

// reporter passes what the block client finds on to the metadata service.
type reporter struct{ m *Mount }

// ChunkPlaced records a late chunk that is durable now. The record may have
// changed since the block was sealed, so its version is asked for first.
func (r reporter) ChunkPlaced(key ids.ChunkKey, disk ids.DiskID, _ uint64) {
	var got api.Blocks
	if err := r.m.meta.Do(context.Background(), &api.GetBlocks{IDs: []ids.BlockID{key.Block}}, &got); err != nil {
		r.m.log.Warn("a late chunk could not be placed; repair will do it", "chunk", key.String(), "err", err)
		return
	}
	if len(got.Blocks) == 1 {
		r.do(&api.PlaceChunk{Key: key, Disk: disk, Version: got.Blocks[0].Version}, key)
	}
}

// ChunkDamaged queues a chunk for repair.
func (r reporter) ChunkDamaged(key ids.ChunkKey, disk ids.DiskID, why string) {
	r.do(&api.QueueRepair{Chunks: []api.ChunkAt{{Key: key, Disk: disk}}, Damage: why}, key)
}

func (r reporter) do(req api.Request, key ids.ChunkKey) {
	err := r.m.meta.Do(context.Background(), req, &api.Empty{})
	// The block may have been repaired or removed meanwhile.
	if err != nil && !errors.Is(err, errkind.Changed) && !errors.Is(err, errkind.NotFound) {
		r.m.log.Warn("the metadata service could not be told of a chunk", "chunk", key.String(), "err", err)
	}
}
