// Package server serves the chunk stores of one process over the data protocol
// (chunk/wire). Server and Conn are the logic: they never touch a socket, wait
// only through internal/sched, and the simulation calls them as Shell does,
// the thin part that owns the TCP connections.
//
// Every request passes three gates. Accept decides, before a payload byte is
// read, whether there is a buffer for it: payloads come only within granted
// credit (data-path rule 23), so memory has a bound whatever the clients do.
// Submit queues the request on its disk, whose workers serve the classes by
// urgency. Seals and small stores then wait for their disk's syncer, where one
// Sync covers all that came meanwhile.
//
// Lock order: Server.mu, then pool.mu. Neither is held across a wait, a disk
// operation or a reply.
package server

import (
	"log/slog"
	"time"

	"github.com/ckptfs/ckptfs/chunk"
	"github.com/ckptfs/ckptfs/internal/ids"
	"github.com/ckptfs/ckptfs/internal/sched"
)

// Disk is one store and its number in the cluster.
type Disk struct {
	ID    ids.DiskID
	Store chunk.Store
}

// Config is what a Server is made of. Boot must differ in each life of the process.
type Config struct {
	Cluster ids.UUID
	Boot    uint64
	Disks   []Disk
	Sched   sched.Sched
	Log     *slog.Logger
	Limits  Limits
	Token   []byte // clients must present it; empty: any may come
}

// Limits bound memory, queues and waits. Zero fields get the default.
type Limits struct {
	PutBuffers   int64 // bytes for payloads of open chunks, granted or received
	StoreBuffers int64 // bytes for payloads of OpStore
	ReadBuffers  int64 // bytes for replies to OpRead that are not sent from a file
	Window       int64 // bytes of credit for an open chunk; halved under pressure, never below wire.MaxPayload
	StoreCredit  int64 // bytes of OpStore payload in flight on one connection

	Workers     int // tasks for each disk
	QueueLen    int // requests waiting for a disk, for each class
	OpenQueue   int // opens waiting for buffers
	OpenChunks  int // chunks open at once
	ConnPending int // requests and unsent replies of one connection

	OpenWait   time.Duration // how long an open waits for buffers before it is told Busy
	LapseAfter time.Duration // an idle open chunk loses its credit
	DropAfter  time.Duration // and is deleted if it holds no bytes
	AbortAfter time.Duration // and is deleted whatever it holds
}

func (l *Limits) setDefaults() {
	def64 := func(v *int64, d int64) {
		if *v <= 0 {
			*v = d
		}
	}
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	wait := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	// Together 112 MiB, of which the pool maps at most a quarter more: with the
	// runtime and the index the process stays under 256 MiB.
	def64(&l.PutBuffers, 72<<20)
	def64(&l.StoreBuffers, 16<<20)
	def64(&l.ReadBuffers, 24<<20)
	def64(&l.Window, 2<<20)
	def64(&l.StoreCredit, 1<<20)
	def(&l.Workers, 4)
	def(&l.QueueLen, 1024)
	def(&l.OpenQueue, 1024)
	def(&l.OpenChunks, 4096)
	def(&l.ConnPending, 1024)
	// A client counts a server that is silent for 50 ms as out.
	wait(&l.OpenWait, 25*time.Millisecond)
	wait(&l.LapseAfter, 10*time.Second)
	wait(&l.DropAfter, 30*time.Second)
	wait(&l.AbortAfter, 5*time.Minute)
}
