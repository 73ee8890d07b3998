package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"
)

// apiError is an answer of the contract: a code of its closed list, its HTTP status, and the kernel's number if one was met.
type apiError struct {
	status  int
	Code    string        `json:"code"`
	Message string        `json:"message"`
	Errno   syscall.Errno `json:"errno"`
	Missing []string      `json:"missing,omitempty"` // of restore_incomplete
}

func (e *apiError) Error() string { return e.Message }

func fail(status int, code, format string, arguments ...any) *apiError {
	return &apiError{status, code, fmt.Sprintf(format, arguments...), 0, nil}
}

func invalid(format string, arguments ...any) *apiError {
	return fail(400, "invalid", format, arguments...)
}

type numbers []syscall.Errno

// The code of each number that the kernel answers with; any other is internal.
var codes = []struct {
	numbers
	status int
	code   string
}{
	{numbers{syscall.ENOENT}, 404, "file_not_found"},
	{numbers{syscall.EEXIST}, 409, "file_exists"},
	{numbers{syscall.EISDIR}, 409, "is_a_directory"},
	{numbers{syscall.ENOTDIR}, 409, "not_a_directory"},
	{numbers{syscall.ENOTEMPTY}, 409, "directory_not_empty"},
	{numbers{syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.EBUSY, syscall.ETXTBSY}, 403, "file_permission_denied"},
	{numbers{syscall.ENAMETOOLONG, syscall.EINVAL, syscall.EILSEQ, syscall.ELOOP}, 422, "file_name_invalid"},
	{numbers{syscall.ENXIO, syscall.ENODEV, syscall.ESPIPE}, 409, "file_kind_unsupported"},
	{numbers{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG}, 507, "disk_full"},
	{numbers{syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN, syscall.ENOMEM}, 429, "limit_reached"},
}

func asAPIError(err error) *apiError {
	if known, ok := errors.AsType[*apiError](err); ok {
		return known
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return errIncomplete
	}
	e := fail(500, "internal", "%s", err)
	e.Errno, _ = errors.AsType[syscall.Errno](err)
	for _, c := range codes {
		if slices.Contains(c.numbers, e.Errno) {
			e.status, e.Code = c.status, c.code
		}
	}
	return e
}

// failure carries an error out of a call: check, demand and got throw it, attempt catches it. Nothing else is thrown on purpose.
type failure struct{ error }

func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func demand(fulfilled bool, problem error) {
	if !fulfilled {
		check(problem)
	}
}

func got[T any](value T, err error) T {
	check(err)
	return value
}

// attempt gives the error that ended work.
func attempt(work func()) (err error) {
	defer func() {
		switch thrown := recover().(type) {
		case nil:
		case failure:
			err = thrown.error
		default: // a fault
			panic(thrown)
		}
	}()
	work()
	return nil
}

// doing is attempt, and says what could not be done to which path.
func doing(verb, path string, work func()) {
	err := attempt(work)
	if number, ok := errors.AsType[syscall.Errno](err); ok {
		err = asAPIError(fmt.Errorf("cannot %s %s: %w", verb, path, number))
	}
	check(err)
}
