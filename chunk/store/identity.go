package store

import (
	"bytes"
	"errors"
	"io/fs"

	"github.com/zeebo/xxh3"

	"github.com/ckptfs/ckptfs/internal/codec"
	"github.com/ckptfs/ckptfs/internal/errkind"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/vfs"
)

const (
	identityFile = "identity"
	identityTemp = "identity.new"
	identitySize = 256 // bytes; what is larger is no identity
)

var magicIdentity = [8]byte{'c', 'k', 'p', 't', 'd', 'i', 's', 'k'}

// Identity says which disk this is. A new disk has a Disk and a Server; the
// rest is zero until the disk is registered with a cluster.
type Identity struct {
	Disk     ids.UUID     // of this disk, made by Format's caller
	Server   ids.UUID     // of the chunk server, the same on all of its disks
	Cluster  ids.UUID     // zero before registration
	DiskID   ids.DiskID   // zero before registration
	ServerID ids.ServerID // zero before registration
}

// Code encodes or decodes the identity.
func (id *Identity) Code(c *codec.Coder) {
	ver := uint8(formatVer)
	c.U8(&ver)
	if ver != formatVer {
		c.Fail("identity version %d; this program knows %d", ver, formatVer)
		return
	}
	c.UUID(&id.Disk)
	c.UUID(&id.Server)
	c.UUID(&id.Cluster)
	codec.VarInt(c, &id.DiskID)
	codec.VarInt(c, &id.ServerID)
}

// CheckCluster returns errkind.WrongCluster when the disk is registered with
// another cluster than want.
func (id Identity) CheckCluster(want ids.UUID) error {
	if id.Cluster.IsZero() || id.Cluster == want {
		return nil
	}
	return errkind.WrongCluster.Wrap("disk %s holds chunks of cluster %s, not of %s; give this server the metadata "+
		"address of its own cluster, or an empty directory", id.Disk, id.Cluster, want)
}

// Format gives an empty directory its identity. Errors: Exists when it has one
// already, Invalid when the directory holds something else.
func Format(f vfs.FS, id Identity) error {
	if id.Disk.IsZero() {
		return errkind.Invalid.Wrap("format disk: no uuid")
	}
	if _, err := ReadIdentity(f); err == nil {
		return errkind.Exists.Wrap("format disk: the directory is a disk already")
	} else if !errors.Is(err, errkind.NotFound) {
		return err
	}
	names, err := f.List(".")
	if err != nil {
		return wrapIO("format disk: list the directory", err)
	}
	for _, name := range names {
		if name != identityTemp && name != "lost+found" {
			return errkind.Invalid.Wrap("format disk: the directory is not empty (it holds %q); give an empty one", name)
		}
	}
	return WriteIdentity(f, id)
}

// ReadIdentity returns the identity of a disk: NotFound when the directory has
// none, Corrupt when it cannot be read.
func ReadIdentity(f vfs.FS) (Identity, error) {
	file, err := f.Open(identityFile)
	if errors.Is(err, fs.ErrNotExist) {
		return Identity{}, errkind.NotFound.Wrap("read identity: the directory is not a ckptfs disk yet")
	}
	if err != nil {
		return Identity{}, wrapIO("read identity", err)
	}
	defer file.Close()
	size, err := file.Size()
	if err != nil {
		return Identity{}, wrapIO("read identity", err)
	}
	p := make([]byte, min(max(size, 0), identitySize+1))
	if _, err := file.ReadAt(p, 0); err != nil && len(p) > 0 {
		return Identity{}, wrapIO("read identity", err)
	}
	return decodeIdentity(p)
}

// WriteIdentity replaces the identity, durably and atomically.
func WriteIdentity(f vfs.FS, id Identity) error {
	if err := f.Remove(identityTemp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return wrapIO("write identity", err)
	}
	file, err := f.Create(identityTemp)
	if err != nil {
		return wrapIO("write identity", err)
	}
	_, err = file.WriteAt(encodeIdentity(id), 0)
	if err == nil {
		err = file.Sync()
	}
	if cerr := file.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = f.Rename(identityTemp, identityFile)
	}
	if err == nil {
		err = f.SyncDir(".")
	}
	if err != nil {
		return wrapIO("write identity", err)
	}
	return nil
}

func encodeIdentity(id Identity) []byte {
	p := codec.Encode(bytes.Clone(magicIdentity[:]), &id)
	p = append(p, make([]byte, 8)...)
	putSum(p)
	return p
}

func decodeIdentity(p []byte) (Identity, error) {
	var id Identity
	if len(p) < 16 || len(p) > identitySize || !bytes.Equal(p[:8], magicIdentity[:]) {
		return id, errkind.Corrupt.Wrap("read identity: the file %q is not a disk identity", identityFile)
	}
	if !sumOK(p) {
		return id, errkind.Corrupt.Wrap("read identity: wrong checksum (want %016x)", xxh3.Hash(p[:len(p)-8]))
	}
	if err := codec.Decode(p[8:len(p)-8], &id); err != nil {
		return Identity{}, errkind.Corrupt.Wrap("read identity: %v", err)
	}
	return id, nil
}
